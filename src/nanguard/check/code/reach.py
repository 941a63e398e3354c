"""What the training of a project reaches: from the code that trains to the code it uses, by name.

Every file is cut into its functions, classes and the code between them. A part that starts a
backward pass, or hands a model to a trainer, trains; so does what calls such a part, up to the
scripts. Whatever these parts name, and what that names in turn, is reached. Importing a file runs
the code between its functions, so that a table of classes, or a decorator that registers one,
reaches these. Files are not parsed for this: a name in a comment or in an import statement alone
reaches nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING

from nanguard.check.code.scopes import bytes_of
from nanguard.check.paths import in_tests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_TRAINS = re.compile(rb"\.backward\(|[Tt]rainer\w*\(|\.fit\(|def training_step\(")
_TRAINING = (b".backward(", b".fit(", b"rainer", b"def training_step(")
_TOP = re.compile(rb"^(?=[^\s#)\]}'\"])", re.MULTILINE)
_DEFINITION = re.compile(rb"(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)")
_IMPORT = re.compile(rb"(?:from|import)[ \t]")
_REGISTERS = re.compile(rb"regist", re.IGNORECASE)
_MAIN = re.compile(rb"if[ \t]+\(?__name__")
_COMMENT = re.compile(rb"#[^\n]*")
# A name that is looked up among all that a file knows: made at once, or one of a whole module's.
_EVALUATED = re.compile(rb"(?<![\w.])eval\((?![\"'])[^()\n]+\)(\()?")
_ALL_OF_IT = re.compile(rb"^from[ \t]+(\S+)[ \t]+import[ \t]*\*", re.MULTILINE)
# What a command line offers for an option, and the branches that are taken by its name.
_FLAG = re.compile(rb"[\"']--([\w-]{1,60})[\"']")
_CHOICES = re.compile(rb"choices\s{0,4}=\s{0,4}[\[(]([^\[\]()]{0,2000})[\])]")
_DEFAULT = re.compile(rb"default\s{0,4}=\s{0,4}[\"']([^\"'\n]{1,60})[\"']")
_QUOTED = re.compile(rb"[\"']([^\"'\n]{1,60})[\"']")
_LONGEST_OPTION = 2_000
_CASE = re.compile(
    rb"([ \t]{1,60})(?:el)?if[ \t]{1,4}([\w.]{1,60})[ \t]{0,4}==[ \t]{0,4}"
    rb"[\"']([^\"'\n]{1,60})[\"'][ \t]{0,4}:"
)
# Where code or a table of settings gives an option a value of its own.
_SET = re.compile(
    rb"\b(?:arg|opt|conf|cfg|param|hparam|flag)\w{0,40}\.(\w{1,60})[ \t]{0,4}=(?!=)"
    rb"|[\"'](\w{1,60})[\"'][ \t]{0,4}:[ \t]{0,4}[\"']",
    re.IGNORECASE,
)
_WORD = bytes(c if c == 95 or chr(c).isalnum() else 32 for c in range(128)) + b" " * 128
BETWEEN, MAIN = "", "__main__"  # the parts of a file that are neither function nor class


@dataclass(slots=True)
class _Part:
    """A function, a class, or the code between them.

    Attributes:
        path: The file.
        name: Its name; ``BETWEEN`` and ``MAIN`` for the code of the file itself.
        words: What it names that the project defines.
        trains: Whether it starts a backward pass, or hands a model to a trainer.
        callable: Whether it is a function, which runs only if somebody names it.
        registered: Whether a decorator puts it into a table when its file is imported.
        evaluates: Whether it looks up something by a name that is known at run time only.
        uses: The parts that its words stand for, by number.
    """

    path: str
    name: str
    words: set[bytes]
    trains: bool
    callable: bool = False
    registered: bool = False
    evaluates: bool = False
    uses: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Reach:
    """Parts of a project, each by its file and its name.

    Attributes:
        reached: What its training reaches.
        unused: Functions that nothing in the project names.
    """

    reached: frozenset[tuple[str, str]]
    unused: frozenset[tuple[str, str]]


def reach_of_training(paths: Iterable[str], only_uses: Callable[[str], bool]) -> Reach:
    """Returns what the training of a project reaches.

    Args:
        paths: The files of the project.
        only_uses: Whether a file is there to use or measure a model, by its name; calling
            something that trains does not make such a file train.
    """
    files = [path for path in paths if not in_tests(path)]
    parts = [*_parts(files)]
    _link(parts)
    users: dict[int, list[int]] = {}
    for number, part in enumerate(parts):
        for used in part.uses:
            users.setdefault(used, []).append(number)
    training = [number for number, part in enumerate(parts) if part.trains]
    above = _closure(
        training,
        lambda number: [u for u in users.get(number, ()) if not only_uses(parts[u].path)],
    )
    files_at, run = _run_at_import(parts)

    def below(number: int) -> list[int]:
        if number >= len(parts):
            return run[number - len(parts)]
        return [*parts[number].uses, files_at[parts[number].path]]

    return Reach(
        frozenset((parts[n].path, parts[n].name) for n in _closure(above, below) if n < len(parts)),
        frozenset((p.path, p.name) for n, p in enumerate(parts) if p.callable and n not in users),
    )


def _run_at_import(parts: list[_Part]) -> tuple[dict[str, int], list[list[int]]]:
    """Returns a number for each file, and what running or importing each of them reaches.

    That is the code between its functions, what a decorator puts into a table, and the files that
    it imports. Files are numbered behind the parts.
    """
    paths = list(dict.fromkeys(part.path for part in parts))
    at = {path: len(parts) + place for place, path in enumerate(paths)}
    run: list[list[int]] = [[] for _ in paths]
    for number, part in enumerate(parts):
        if part.registered or part.name == BETWEEN:
            run[at[part.path] - len(parts)].append(number)
    stems: dict[bytes, list[str]] = {}
    for path in paths:
        stems.setdefault(_stem(path), []).append(path)
    for path in paths:
        others = [file for word in _imported(path) for file in stems.get(word, ()) if file != path]
        run[at[path] - len(parts)] += [at[file] for file in _nearest(path, others)]
    return at, run


def _nearest(path: str, others: list[str]) -> list[str]:
    """Returns the files that an import may mean: of those with the same name, the nearest."""
    best: dict[bytes, tuple[int, str]] = {}
    for other in others:
        shared = sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(path, other, strict=False))
        )
        stem = _stem(other)
        if stem not in best or shared > best[stem][0]:
            best[stem] = (shared, other)
    return [file for _, file in best.values()]


def _closure(start: Iterable[int], following: Callable[[int], list[int]]) -> set[int]:
    found: set[int] = set()
    queue = [*start]
    while queue:
        number = queue.pop()
        if number not in found:
            found.add(number)
            queue += following(number)
    return found


def _parts(files: list[str]) -> Iterator[_Part]:
    """Yields the parts of all files, with the words that name a part."""
    defined: set[bytes] = set()
    for path in files:
        content = bytes_of(path)
        defined |= {match[1] for match in map(_DEFINITION.match, _pieces(content)) if match}
    offered = _offered(files)
    for path in files:
        content = _COMMENT.sub(b"", bytes_of(path))
        texts: dict[str, list[bytes]] = {}
        registered: set[str] = set()
        decorator = b""
        for piece in _pieces(content):
            if _IMPORT.match(piece) or piece.startswith(b"__all__"):
                continue
            match = _DEFINITION.match(piece)
            name = match[1].decode(errors="replace") if match else BETWEEN
            if match and _REGISTERS.search(decorator):
                registered.add(name)
            decorator = piece if piece.startswith(b"@") else b""
            texts.setdefault(MAIN if _MAIN.match(piece) else name, []).append(piece)
        texts.setdefault(BETWEEN, [])  # a file that only imports runs what it imports
        for name, pieces in texts.items():
            text = b"".join(pieces)
            if offered:
                text = _without_closed_branches(text, offered)
            words = defined.intersection(text.translate(_WORD).split())
            function = text.startswith((b"def ", b"async "))
            trains = is_training_code(text)
            yield _Part(
                path, name, words, trains, function, registered=name in registered,
                evaluates=_EVALUATED.search(text) is not None,
            )  # fmt: skip


def _options(content: bytes) -> Iterator[tuple[bytes, set[bytes] | None]]:
    """Yields the options of a command line, each with what it can be; None where that is open."""
    for piece in content.split(b"add_argument(")[1:]:
        text = piece[:_LONGEST_OPTION]
        flag, choices = _FLAG.search(text), _CHOICES.search(text)
        if flag is None:
            continue
        if choices is None or _QUOTED.sub(b"", choices[1]).strip(b", \t\r\n"):
            yield flag[1], None
        else:
            yield flag[1], {*_QUOTED.findall(choices[1]), *_DEFAULT.findall(text)}


def _offered(files: list[str]) -> list[set[bytes]]:
    """Returns what each option can be that scripts offer a choice for, wherever it is asked for."""
    choices: dict[bytes, set[bytes]] = {}
    free: set[bytes] = set()
    for path in files:
        for name, given in _options(bytes_of(path)):
            if given is None:
                free.add(name)
            else:
                choices.setdefault(name, set()).update(given)
    if choices:
        written = {word for path in files for word in _set_in(bytes_of(path))}
        free |= {name for name in choices if name.replace(b"-", b"_") in written}
    return [given for name, given in choices.items() if name not in free]


def _set_in(content: bytes) -> set[bytes]:
    """Returns the names to which some code gives a value as to an option."""
    return {attribute or key for attribute, key in _SET.findall(content)}


def _cases(text: bytes) -> Iterator[tuple[bytes, bytes, int, int]]:
    """Yields the branches that are taken for a name: what is asked, the name, and their lines."""
    lines = text.splitlines(keepends=True)
    for at, line in enumerate(lines):
        case = _CASE.match(line) if b"==" in line else None
        if case is None:
            continue
        end = at + 1
        while end < len(lines) and (not lines[end].strip() or _depth(lines[end]) > len(case[1])):
            end += 1
        yield case[2], case[3], at, end


def _depth(line: bytes) -> int:
    return len(line) - len(line.lstrip(b" \t"))


def _without_closed_branches(text: bytes, offered: list[set[bytes]]) -> bytes:
    """Returns some code without what is done for a choice that no script offers.

    Branches are of an option if scripts offer two of the names that one thing is compared with.
    """
    asked: dict[bytes, list[tuple[bytes, int, int]]] = {}
    for what, name, begin, end in _cases(text):
        asked.setdefault(what, []).append((name, begin, end))
    closed: set[int] = set()
    # What is compared with one name only cannot be with two that are offered.
    for mine in (cases for cases in asked.values() if len(cases) > 1):
        compared = {name for name, _, _ in mine}
        for names in offered:
            if len(compared & names) > 1:
                closed |= {
                    at for n, begin, end in mine if n not in names for at in range(begin, end)
                }
    if not closed:
        return text
    lines = text.splitlines(keepends=True)
    return b"".join(line for at, line in enumerate(lines) if at not in closed)


def outline_of(content: bytes, defined: set[bytes]) -> list[object]:
    """Returns what the reach of a project takes from a file: its parts, and what each names.

    Args:
        content: What the file holds.
        defined: Everything that the project defines.
    """
    found: list[object] = [(name, given and sorted(given)) for name, given in _options(content)]
    found.append(sorted(_set_in(content)))
    for piece in _pieces(_COMMENT.sub(b"", content)):
        if _IMPORT.match(piece) or piece.startswith((b"@", b"__all__")):
            found.append(piece)
            continue
        match = _DEFINITION.match(piece)
        begins = piece[: match.end()] if match else _MAIN.match(piece) is not None
        words = sorted(defined.intersection(piece.translate(_WORD).split()))
        evaluates = _EVALUATED.search(piece) is not None
        lines = piece.splitlines()
        cases = [
            (
                what,
                name,
                sorted(defined.intersection(b" ".join(lines[at:end]).translate(_WORD).split())),
            )
            for what, name, at, end in _cases(piece)
        ]
        found.append((begins, words, is_training_code(piece), evaluates, cases))
    return found


def is_training_code(text: bytes) -> bool:
    """Returns whether some code starts a backward pass, or hands a model to a trainer."""
    return any(word in text for word in _TRAINING) and _TRAINS.search(text) is not None


def evaluates_name(content: bytes) -> bool:
    """Returns whether a file makes what a text names, or finds it among all of a module."""
    if b"eval(" not in content:
        return False
    found = list(_EVALUATED.finditer(content))
    return bool(found) and (any(one[1] for one in found) or _ALL_OF_IT.search(content) is not None)


def _pieces(content: bytes) -> Iterator[bytes]:
    """Yields the statements that begin at the margin, each to its end."""
    begins = [match.start() for match in _TOP.finditer(content)]
    for begin, end in pairwise([*begins, len(content)]):
        yield content[begin:end]


def _link(parts: list[_Part]) -> None:
    """Notes which parts the words of each part stand for: those of its own file, or of others."""
    by_name: dict[bytes, list[int]] = {}
    for number, part in enumerate(parts):
        if part.name not in (BETWEEN, MAIN):
            by_name.setdefault(part.name.encode(), []).append(number)
    imported: dict[str, set[bytes]] = {}
    for part in parts:
        for word in part.words:
            candidates = by_name.get(word, [])
            own = [n for n in candidates if parts[n].path == part.path]
            if own:
                part.uses += [n for n in own if parts[n] is not part]
            elif len(candidates) < 2:
                part.uses += candidates
            else:
                if part.path not in imported:
                    imported[part.path] = _imported(part.path)
                known = [n for n in candidates if _is_among(parts[n].path, imported[part.path])]
                part.uses += known or candidates
        part.words.clear()
        if part.evaluates:
            modules = {m.rpartition(b".")[2] for m in _ALL_OF_IT.findall(bytes_of(part.path))}
            part.uses += [n for n, one in enumerate(parts) if _is_among(one.path, modules)]


def _imported(path: str) -> set[bytes]:
    """Returns the words of a file's import statements."""
    found: set[bytes] = set()
    for piece in _pieces(bytes_of(path)):
        if _IMPORT.match(piece):
            found.update(piece.translate(_WORD).split())
    return found


def _is_among(path: str, words: set[bytes]) -> bool:
    """Returns whether a file, or the package it makes, is named by one of some words."""
    return _stem(path) in words


def _stem(path: str) -> bytes:
    """Returns the name by which a file is imported."""
    *folders, name = path.replace("\\", "/").rpartition(".")[0].split("/")
    return (folders[-1] if name == "__init__" and folders else name).encode()
