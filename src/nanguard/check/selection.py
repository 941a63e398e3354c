"""Which findings count: selected rules, comments that allow one, and the baseline of a project.

A comment counts for the statement it stands in, or, on a line of its own, for the statement below.
``# nanguard: ignore-file[name] reason`` counts for the whole file.


An entry names the rule, the file and the line of source, not its number: code may move.
"""

from __future__ import annotations

import io
import os
import re
from collections import Counter
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from nanguard.check.rule import Fails, Passes, all_rules, rules_for
from nanguard.errors import SettingsError
from nanguard.findings import Finding, Severity
from nanguard.source.text import write_atomically

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from nanguard.check.outcome import Seen
    from nanguard.check.rule import Reads, Rule
    from nanguard.source.text import Text

    Key = tuple[str, str, str]

ALL = "ALL"
CODES = ("SRC", "CFG", "DAT", "CKP", "LOG")
UNUSED_IGNORE = ("CHK001", "unused-ignore")
_CODE = re.compile(r"[A-Za-z]{3}\d{0,3}")


@dataclass(frozen=True, slots=True)
class Selection:
    """The rules of a check, named as users name them.

    Attributes:
        select: Names, codes or beginnings of codes of the rules to run; none for all.
        ignore: The same, of rules to leave out.
        per_file: Pairs of a pattern and what is left out of the files it matches.
        root: The folder the patterns are relative to.
        extend: Names, codes or groups of rules to run besides.
    """

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    per_file: tuple[tuple[str, tuple[str, ...]], ...] = ()
    root: str = "."
    extend: tuple[str, ...] = ()

    def wants(self, code: str, name: str, group: str = "") -> bool:
        """Returns whether a rule runs at all; it is named by itself, or by its group."""

        def named(words: tuple[str, ...]) -> bool:
            return any(stands_for(word, code, name) or word == group != "" for word in words)

        return not named(self.ignore) and (
            not self.select or named(self.select) or named(self.extend)
        )

    def rules(self, reads: Reads) -> tuple[Rule[Any], ...]:
        """Returns the rules of one kind that run."""
        return tuple(r for r in rules_for(reads) if self.wants(r.code, r.name, r.group))

    def ignored_in(self, path: str) -> tuple[str, ...]:
        """Returns what is left out of one file."""
        if not self.per_file:
            return ()
        return tuple(
            word
            for pattern, words in self.per_file
            if _matches(_relative(path, self.root), pattern)
            for word in words
        )

    def applies(self, code: str, name: str, path: str) -> bool:
        """Returns whether a rule that runs also runs on a file."""
        return not any(stands_for(word, code, name) for word in self.ignored_in(path))

    def checked_words(self) -> Selection:
        """Returns the selection itself, once every word in it is known to name a rule.

        Raises:
            SettingsError: A word names no rule.
        """
        words = {
            *self.select,
            *self.extend,
            *self.ignore,
            *(w for _, words in self.per_file for w in words),
        }
        if not words:
            return self
        known = [(rule.code, rule.name) for rule in all_rules()] + [UNUSED_IGNORE]
        groups = {rule.group for rule in all_rules()} - {""}
        for word in sorted(words):
            named = any(stands_for(word, code, name) for code, name in known)
            if not named and word not in groups:
                raise _unknown(word, [*(name for _, name in known), *CODES, *groups])
        return self


def stands_for(word: str, code: str, name: str) -> bool:
    """Returns whether a word names a rule: by name, by code, or by the beginning of its code."""
    if word in (name, ALL):
        return True
    return _CODE.fullmatch(word) is not None and code.startswith(word.upper())


def _unknown(word: str, names: list[str]) -> SettingsError:
    import difflib

    near = difflib.get_close_matches(word, names, n=3)
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    return SettingsError(
        f"there is no rule {word!r}.",
        where="the rules to select or ignore",
        do=f"{hint}Give a rule's name, its code, or the beginning of codes: {', '.join(CODES)}.",
    )


@lru_cache(maxsize=4096)
def _relative(path: str, root: str) -> str:
    import os.path

    full = os.path.abspath(path)  # noqa: PTH100 - a link is matched by its own name
    base = os.path.abspath(root)  # noqa: PTH100
    inside = full.startswith(base.rstrip(os.sep) + os.sep)
    return (os.path.relpath(full, base) if inside else full).replace(os.sep, "/")


def _matches(path: str, pattern: str) -> bool:
    if pattern.endswith("/"):
        pattern += "**"
    if "/" not in pattern:
        return fnmatch(PurePath(path).name, pattern)
    return fnmatch(path, pattern) or fnmatch(path, pattern.replace("**/", ""))


_MARK = "nanguard:"


class UnusedIgnore:
    """A comment allows a finding that is not there.

    Why it breaks a run: it does not, yet. A comment that allows nothing today hides the fault that
    somebody writes into that line tomorrow. The same holds for a comment whose rule is misspelt.

    Remove the comment, or the name that is not needed any more.
    """

    code, name = UNUSED_IGNORE
    severity = Severity.INFO
    reads = "code"
    seen_in = ""
    examples = (
        Fails("loss = total / 8  # nanguard: ignore[unguarded-log] at least one sample\n"),
        Passes("loss = total / 8  # at least one sample\n"),
    )


_COMMENT = re.compile(r"#\s*nanguard:\s*(ignore-file|ignore)\b\s*(?:\[([^\]]*)\])?")
_QUOTED = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'[^']*'")
_BLOCK_SCALAR = re.compile(r"(?:^|[\s:-])[|>][+-]?\d?[+-]?\s*(?:#.*)?$")
_EVERYWHERE = (1, 1 << 60)


@dataclass(slots=True)
class Ignore:
    """One comment.

    Attributes:
        line: Where it stands, counted from 1.
        column: The column it begins at, counted from 1.
        words: What it names.
        first: The first line it counts for.
        last: The last line it counts for.
        used: The words that allowed something.
    """

    line: int
    column: int
    words: tuple[str, ...]
    first: int
    last: int
    used: set[str] = field(default_factory=set)

    def allows(self, finding: Finding) -> bool:
        """Returns whether it allows a finding; remembers it if so."""
        if (self.first, self.last) != _EVERYWHERE and (
            finding.line is None or not self.first <= finding.line <= self.last
        ):
            return False
        words = [w for w in self.words if stands_for(w, finding.code, finding.name)]
        self.used.update(words)
        return bool(words)


def ignores_in(text: Text, *, python: bool) -> list[Ignore]:
    """Returns the comments of a text that allow something.

    Args:
        text: The text.
        python: Whether it is Python; YAML and TOML otherwise.
    """
    if _MARK not in text.content:
        return []
    return list(_python(text) if python else _config(text))


def suppress(findings: Iterable[Finding], ignores: list[Ignore]) -> tuple[list[Finding], int]:
    """Returns the findings that nothing allows, and how many are allowed."""
    kept, allowed = [], 0
    for finding in findings:
        # Every comment is asked, so that none of two counts as unused.
        asked = [ignore.allows(finding) for ignore in ignores]
        if any(asked):
            allowed += 1
        else:
            kept.append(finding)
    return kept, allowed


def unused(
    path: str, ignores: list[Ignore], known: dict[str, str], ran: set[str], selection: Selection
) -> Iterator[Finding]:
    """Yields a finding for every comment that allows nothing.

    Args:
        path: The file.
        ignores: Its comments, after its findings have been compared with them.
        known: The code of every rule there is, by name.
        ran: The names of the rules that looked at the file.
        selection: The rules of the check.
    """
    code, name = UNUSED_IGNORE
    if not selection.wants(code, name) or not selection.applies(code, name, path):
        return
    for ignore in ignores:
        for message in _complaints(ignore, known, ran):
            yield Finding(code, name, Severity.INFO, message, path, ignore.line, ignore.column)


def _complaints(ignore: Ignore, known: dict[str, str], ran: set[str]) -> Iterator[str]:
    if not ignore.words:
        yield "the comment names no rule, so it allows nothing; write # nanguard: ignore[name]"
    for word in ignore.words:
        named = {name for name, code in known.items() if stands_for(word, code, name)}
        if not named:
            yield f"{word!r} is no rule, so the comment allows nothing"
        elif word not in ignore.used and named <= ran:
            yield f"{word} finds nothing here any more; remove it from the comment"


def _ignore(found: re.Match[str], line: int, column: int, first: int, last: int) -> Ignore:
    words = tuple(word.strip() for word in (found.group(2) or "").split(",") if word.strip())
    if found.group(1) == "ignore-file":
        first, last = _EVERYWHERE
    return Ignore(line, column, words, first, last)


def _python(text: Text) -> Iterator[Ignore]:
    """Yields the comments of Python code; each counts for its logical line."""
    import tokenize

    waiting: list[tuple[re.Match[str], int, int]] = []
    first = 0
    try:
        for token in tokenize.generate_tokens(io.StringIO(text.content).readline):
            if token.type == tokenize.COMMENT:
                found = _COMMENT.search(token.string)
                if found:
                    waiting.append((found, token.start[0], token.start[1] + 1))
            elif token.type == tokenize.NEWLINE:
                for found, line, column in waiting:
                    yield _ignore(found, line, column, min(first, line), token.end[0])
                waiting, first = [], 0
            elif token.type not in (tokenize.NL, tokenize.INDENT, tokenize.DEDENT) and not first:
                first = token.start[0]
    except (tokenize.TokenError, SyntaxError):  # what was read until here still counts
        pass
    for found, line, column in waiting:
        yield _ignore(found, line, column, line, line)


def _config(text: Text) -> Iterator[Ignore]:
    """Yields the comments of YAML or TOML; each counts for its line, or the next one."""
    waiting: list[tuple[re.Match[str], int, int]] = []
    deeper: int | None = None
    for number in range(1, len(text.starts) + 1):
        line = text.line(number)
        indent = len(line) - len(line.lstrip())
        if deeper is not None and (not line.strip() or indent > deeper):
            continue
        deeper = (
            indent if _BLOCK_SCALAR.search(line) and not line.lstrip().startswith("#") else None
        )
        blanked = _QUOTED.sub(lambda m: "x" * len(m.group()), line)
        found = _COMMENT.search(blanked)
        if found and (found.start() == 0 or blanked[found.start() - 1].isspace()):
            waiting.append((found, number, found.start() + 1))
        if line.strip() and not line.lstrip().startswith("#"):
            for match, at, column in waiting:
                yield _ignore(match, at, column, at, number)
            waiting = []
    for match, at, column in waiting:
        yield _ignore(match, at, column, at, at)


_SCHEMA = "nanguard.baseline/1"
_BASELINE_BYTES = 64 << 20
_TEXT = 200


class Baseline:
    """What is known, and how often.

    Args:
        file: Where it is kept; paths in it are relative to its folder.
        known: How often each finding is known.
    """

    def __init__(self, file: Path, known: Counter[Key]) -> None:
        self._file = file
        self._known = known

    @classmethod
    def read(cls, file: Path) -> Baseline:
        """Reads a baseline.

        Raises:
            SettingsError: It is none.
        """
        try:
            known = Counter({_entry(e): int(e["count"]) for e in _entries(_told(file))})
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            said = getattr(error, "strerror", None) or error
            raise SettingsError(
                f"the baseline cannot be read: {said}.",
                where=str(file),
                do="Write it anew: nanguard check --write-baseline FILE PATH",
            ) from error
        return cls(file, known)

    @classmethod
    def of(cls, file: Path, seen: Iterable[Seen]) -> Baseline:
        """Returns the baseline in which everything found is known."""
        return cls(file, Counter(_key(one, file.parent) for one in seen))

    def write(self) -> None:
        """Writes the baseline.

        Raises:
            SettingsError: The file cannot be written.
        """
        import json

        entries = [
            {"path": path, "name": name, "text": text, "count": count}
            for (path, name, text), count in sorted(self._known.items())
        ]
        told = json.dumps({"schema": _SCHEMA, "findings": entries}, indent=1) + "\n"
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._file, told.encode())
        except OSError as error:
            raise SettingsError(
                f"the baseline cannot be written: {error.strerror}.",
                where=str(self._file),
                do="Choose another file.",
            ) from error

    def new(self, seen: Iterable[Seen]) -> list[Seen]:
        """Returns what is not known; of equal findings, those beyond the known number."""
        left = self._known.copy()
        out = []
        for one in seen:
            key = _key(one, self._file.parent)
            if left[key] > 0:
                left[key] -= 1
            else:
                out.append(one)
        return out

    def stale(
        self, seen: Iterable[Seen], checked: Sequence[str], rules: Iterable[str]
    ) -> list[str]:
        """Returns entries that nothing corresponds to any more, in words.

        Args:
            seen: Everything that was found.
            checked: The files that were looked at; entries of others may still hold.
            rules: The names of the rules that looked; likewise.
        """
        root = self._file.parent
        left = self._known - Counter(_key(one, root) for one in seen)
        looked, names = {_seen_from(path, root) for path in checked}, set(rules)
        return [
            f"{path}: {name}: {text}"
            for path, name, text in sorted(left)
            if name in names and (path in looked or not (root / path).exists())
        ]


def _told(file: Path) -> Any:
    import json

    if file.stat().st_size > _BASELINE_BYTES:
        raise ValueError(f"it is larger than {_BASELINE_BYTES >> 20} MB")
    return json.loads(file.read_bytes())


def _entries(told: Any) -> list[dict[str, Any]]:
    if not isinstance(told, dict) or told.get("schema") != _SCHEMA:
        raise ValueError(f"it does not begin with the schema {_SCHEMA}")
    entries = told["findings"]
    if not isinstance(entries, list):
        raise TypeError("its findings are no list")
    return entries


def _entry(entry: dict[str, Any]) -> Key:
    return str(entry["path"]), str(entry["name"]), str(entry["text"])


def _key(one: Seen, root: Path) -> Key:
    text = " ".join((one.text or one.finding.where or "").split())[:_TEXT]
    return _seen_from(one.finding.path or "", root), one.finding.name, text


def _seen_from(path: str, root: Path) -> str:
    return os.path.relpath(path, root).replace(os.sep, "/") if path else ""
