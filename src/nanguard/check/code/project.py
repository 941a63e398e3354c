"""The Python files of a project: what an imported name stands for, and which torch is asked for.

A file is judged together with those it imports from, and these with those they import from: what
they define is read where it stands, and functions only when somebody calls them. Each file is read
at most twice in a process, once for itself and once for the others, however many ask for it.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import warnings
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanguard.check.code.code import Code
from nanguard.check.code.reach import (
    Reach,
    evaluates_name,
    is_training_code,
    outline_of,
    reach_of_training,
)
from nanguard.check.code.scopes import Modules, absolute, bytes_of
from nanguard.check.code.training_path import is_named_for_evaluation
from nanguard.errors import SourceError
from nanguard.source.text import (
    PYTHON_LIMIT,
    Text,
    decode,
    own_folder,
    read_bytes,
    write_atomically,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nanguard.check.code.scopes import Class, Function
    from nanguard.check.code.values import Value

_FILES = ("pyproject.toml", "setup.py", "setup.cfg", "requirements.txt", "requirements/base.txt")
_FLOOR = re.compile(r"(?<![\w-])torch\s*>=\s*(\d+)\.(\d+)")
_REQUIREMENTS_BYTES = 256 << 10
_FOLDERS_ABOVE = 8


def torch_floor(path: str) -> tuple[int, int] | None:
    """Returns the oldest torch that the project of a file allows; None if it does not say."""
    return _floor(str(Path(path).absolute().parent), _FOLDERS_ABOVE)


@lru_cache(maxsize=4096)
def _floor(folder: str, levels: int) -> tuple[int, int] | None:
    place = Path(folder)
    for name in _FILES:
        found = _in_file(place / name)
        if found is not None:
            return found
    if levels == 0 or place.parent == place or (place / ".git").exists():
        return None
    return _floor(str(place.parent), levels - 1)


def _in_file(file: Path) -> tuple[int, int] | None:
    try:
        if not file.is_file() or file.stat().st_size > _REQUIREMENTS_BYTES:
            return None
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    floors = [(int(major), int(minor)) for major, minor in _FLOOR.findall(text)]
    return min(floors, default=None)


_KEPT_LINES = 60_000  # of outlines in a process; about 100 MB
_DEEPEST = 12  # files that are read one for the sake of the other
_MOST_CALLERS = 40  # files that are searched for the calls of one class or function
_DEFINED = re.compile(rb"\n[ \t]*(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)")
# Everything but words and the parentheses behind them is blank.
_WORDS = bytes(c if c in b"_(" or chr(c).isalnum() else 32 for c in range(128)) + b" " * 128
# Names of functions that every file has for other things as well.
_COMMON = frozenset({"forward", "loss", "train", "main", "step", "update", "model", "data", "run"})
# What makes things by a path that a configuration holds.
_BY_PATH = (b"hydra", b"'_target_'", b'"_target_"', b"pydoc.locate(")
_BY_NAME = (
    b"import_module(", b"__import__(", b"pkgutil", b"registry", *_BY_PATH,
    b"globals()[", b"__dict__[",
)  # fmt: skip
_MADE_BY_NAME = re.compile(rb"getattr\([^()\n]*\)\(")
_IMPORTS = re.compile(rb"\n[ \t]*(?:from|import)[ \t]+([^\n#]+)")
_NUMBER = (
    r"(-?\d[\d_]*(?:\.\d*)?(?:[eE][+-]?\d+)?|-?\.\d+(?:[eE][+-]?\d+)?|float\(['\"]-?inf['\"]\))"
)
_OPTION = re.compile(
    r"add_argument\(\s*(?:['\"]-\w['\"]\s*,\s*)?['\"]--?([A-Za-z][\w\-]*)['\"]"
    r"[^()]{0,400}?\bdefault\s*=\s*" + _NUMBER
)
_FIELD = re.compile(
    r"^[ \t]+(\w+)[ \t]*:[ \t]*[\w\[\]., |\"']{1,60}=[ \t]*" + _NUMBER, re.MULTILINE
)
_BRACKETS = re.compile(
    rb"[()\[\]{}]|#[^\n]*|\"{3}.*?\"{3}|'{3}.*?'{3}|\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'",
    re.DOTALL,
)
_LONGEST_CALL = 8_000  # characters
_LONGEST_SETTINGS = 400_000  # characters; a file of settings is shorter


@dataclass(slots=True)
class _Index:
    """What is called and named in a project, by name.

    Attributes:
        callers: The files that call something.
        users: The files that name something without calling it, as to give it another name.
        words: How often something is named, its definition counted.
        trains: The files that start a backward pass, or hand a model to a trainer.
        imported: The words of all import statements.
        by_name: Whether some file is imported by a name that is put together at run time.
        by_path: Whether something is made by a path that stands in a configuration.
    """

    callers: dict[str, list[str]] = field(default_factory=dict)
    users: dict[str, list[str]] = field(default_factory=dict)
    words: dict[str, int] = field(default_factory=dict)
    trains: set[str] = field(default_factory=set)
    imported: set[str] = field(default_factory=set)
    by_name: bool = False
    by_path: bool = False


@dataclass(slots=True)
class _Counted:
    """What is counted in all files of a project."""

    index: _Index
    reach: Reach
    settings: dict[str, set[float]]


_KEPT_SCHEMA = "nanguard.project/1"
_MOST_CHANGED = 16  # files that are compared one by one before everything is counted again
_KEPT_FROM = 40  # files; below, counting them costs less than keeping the numbers
_KEPT_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class KeptIndex:
    """A file in which is kept what was counted in all files of a project.

    A file that was written since then changes nothing as long as it defines, calls and names the
    same things of the project, and imports the same modules.

    Attributes:
        file: Where it is kept.
        made_by: What tells one state of the program from another.
    """

    file: Path
    made_by: str

    def load(self, paths: list[str]) -> _Counted | None:
        """Returns what was counted; None if it is not there, or of other files."""
        if len(paths) < _KEPT_FROM:
            return None
        try:
            if self.file.stat().st_size > _KEPT_BYTES:
                return None
            told = json.loads(self.file.read_bytes())
            if [told["schema"], told["made_by"]] != [_KEPT_SCHEMA, self.made_by]:
                return None
            return self._counted(told, paths)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def save(self, paths: list[str], counted: _Counted) -> None:
        """Writes what was counted."""
        if len(paths) < _KEPT_FROM:
            return
        index, reach = counted.index, counted.reach
        defined = {word.encode() for word in index.words}
        told = {
            "schema": _KEPT_SCHEMA,
            "made_by": self.made_by,
            "files": {path: [*_stamp(path), _facts(path, defined)] for path in sorted(paths)},
            "callers": index.callers,
            "users": index.users,
            "words": index.words,
            "trains": sorted(index.trains),
            "imported": sorted(index.imported),
            "by_name": index.by_name,
            "by_path": index.by_path,
            "reached": sorted(reach.reached),
            "unused": sorted(reach.unused),
            "settings": {name: sorted(found) for name, found in counted.settings.items()},
        }
        try:
            own_folder(self.file.parent)
            write_atomically(self.file, json.dumps(told, separators=(",", ":")).encode())
        except (OSError, ValueError):  # a folder that cannot be written to is no reason to fail
            return

    def _counted(self, told: dict[str, Any], paths: list[str]) -> _Counted | None:
        files = told["files"]
        if len(files) != len(paths) or any(path not in files for path in paths):
            return None
        changed = [path for path in paths if [*_stamp(path)] != files[path][:2]]
        if len(changed) > _MOST_CHANGED:
            return None
        index = _Index(
            told["callers"],
            told["users"],
            told["words"],
            set(told["trains"]),
            set(told["imported"]),
            bool(told["by_name"]),
            bool(told["by_path"]),
        )
        if changed:
            defined = {word.encode() for word in index.words}
            if any(_facts(path, defined) != files[path][2] for path in changed):
                return None
        reach = Reach(
            frozenset((path, name) for path, name in told["reached"]),
            frozenset((path, name) for path, name in told["unused"]),
        )
        settings = {name: set(map(float, found)) for name, found in told["settings"].items()}
        return _Counted(index, reach, settings)


def _stamp(path: str) -> tuple[int, int]:
    """Returns what changes when a file is written."""
    try:
        about = os.stat(path)  # noqa: PTH116 - a Path for each is slow
    except OSError:
        return (0, 0)
    return (about.st_mtime_ns, about.st_size)


def _facts(path: str, defined: set[bytes]) -> str:
    """Returns a digest of all that is counted in a file, given what the project defines."""
    data = bytes_of(path)
    words = Counter(data.translate(_WORDS).replace(b"(", b"( ").split())
    told = (
        _DEFINED.findall(b"\n" + data),
        sorted((w, n) for w, n in words.items() if w.removesuffix(b"(") in defined),
        is_training_code(data),
        _imports_by_name(data),
        _makes_by_path(data),
        [line.translate(_WORDS).split() for line in _IMPORTS.findall(b"\n" + data)],
        _settings_in(data),
        outline_of(data, defined),
    )
    return hashlib.blake2b(repr(told).encode(), digest_size=16).hexdigest()


class Project:
    """The files that belong together, by what they are called.

    Args:
        paths: The Python files, as the user would name them.
        kept: Where what is counted in all of them is kept; None for nowhere.

    Attributes:
        kept: Where what is counted in all of them is kept.
        paths: The files, by their absolute paths.
        consulted: The files that were looked into since it was emptied, but for the one at hand.
    """

    def __init__(self, paths: Iterable[str], kept: KeptIndex | None = None) -> None:
        self.kept = kept
        self.paths: dict[str, str] = {absolute(path): path for path in paths}
        self.consulted: set[str] = set()
        self._modules = Modules(self.paths)
        self._outlines: dict[str, Code | None] = {}
        self._reading: list[str] = []
        self._asked: dict[str, set[str]] = {}
        self._lines = 0
        self._calls: dict[str, list[ast.Call]] = {}
        self._first: dict[tuple[str, str], str] = {}
        self._found: dict[bytes, bool] = {}
        self._with: dict[str, list[str]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Gives another process the files, and nothing that was read of them."""
        return {"paths": self.paths}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes over the files that another process knows."""
        self.__init__(())  # type: ignore[misc]
        self.paths = state["paths"]
        self._modules = Modules(self.paths)

    def find(
        self, importer: str, up: int, parts: tuple[str, ...]
    ) -> Function | Class | Value | None:
        """Returns what a dotted name stands for; None if it is of no file of the project.

        Args:
            importer: The file in which the name is used.
            up: How many dots the import begins with.
            parts: The parts of the dotted name, the member's included.
        """
        asking = absolute(importer)
        place = self._modules.place(asking, up, parts)
        if place is None or place.path == asking:
            return None
        self._asked.setdefault(asking, set()).update((place.path, *place.through))
        code = self.outline(place.path)
        return _member(code, place.members) if code is not None else None

    def outline(self, path: str) -> Code | None:
        """Returns a file of the project; None if it cannot be read, or is being read just now.

        Args:
            path: The file's absolute path.
        """
        self.consulted.add(path)
        if path in self._outlines:
            return self._outlines[path]
        if path in self._reading or len(self._reading) >= _DEEPEST:
            return None
        if self._lines > _KEPT_LINES:
            # Files hold on to those they import from, so that all of them go at once.
            self._outlines.clear()
            self._lines = 0
        self._reading.append(path)
        try:
            code = _read(self.paths[path], self)
        finally:
            self._reading.pop()
        self._outlines[path] = code
        self._lines += code.length if code is not None else 0
        return code

    def result_of(self, function: Function) -> Value | None:
        """Returns what a function of another file gives back; None if that leads too far."""
        if function.home is None or len(self._reading) >= _DEEPEST:
            return None
        self._reading.append("")
        try:
            return function.home.result_of(function)
        except RecursionError:  # it is read for a file that can be checked without it
            return None
        finally:
            self._reading.pop()

    def needed(self) -> set[str]:
        """Returns the files that were looked into, and those that these were read with."""
        found: set[str] = set()
        queue = list(self.consulted)
        while queue:
            path = queue.pop()
            if path not in found:
                found.add(path)
                queue += self._asked.get(path, ())
        return found

    def setting(self, name: str) -> float | None:
        """Returns the number that options and settings of this name have by default.

        None if there is no such setting, or if several of that name differ.
        """
        found = self._settings.get(name)
        return next(iter(found)) if found is not None and len(found) == 1 else None

    def calls_of(self, name: str) -> list[ast.Call] | None:
        """Returns all calls of a class or function in the project, by its name.

        None if there are too many files to look into.
        """
        if name not in self._calls:
            files = self._callers.get(name, [])
            if len(files) > _MOST_CALLERS:
                return None
            self._calls[name] = [call for path in files for call in _calls_in(path, name)]
        self.consulted |= {absolute(path) for path in self._callers.get(name, ())}
        return self._calls[name]

    def callers(self, name: str) -> list[str]:
        """Returns the files that call something of this name, as the user would name them."""
        self.consulted |= {absolute(path) for path in self._callers.get(name, ())}
        return self._callers.get(name, [])

    def users(self, name: str) -> list[str]:
        """Returns the files that call something of this name, and then those that only name it."""
        called = self.callers(name)
        named = [path for path in self._index.users.get(name, ()) if path not in called]
        self.consulted |= {absolute(path) for path in named}
        return [*called, *named]

    def holds(self, path: str, sought: str | re.Pattern[bytes]) -> bool:
        """Returns whether a word, or what a pattern describes, stands in a file of the project."""
        self.consulted.add(absolute(path))
        if isinstance(sought, str):
            return sought.encode() in bytes_of(path)
        return sought.search(bytes_of(path)) is not None

    def some_file_has(self, pattern: re.Pattern[bytes]) -> bool:
        """Returns whether a pattern is found in some file of the project."""
        known = self._found.get(pattern.pattern)
        if known is None:
            known = any(pattern.search(bytes_of(path)) for path in self.paths.values())
            self._found[pattern.pattern] = known
        return known

    def contents_with(self, word: str) -> Iterator[str]:
        """Yields what the files hold in which a word stands."""
        if word not in self._with:
            self._with[word] = [p for p in self.paths.values() if word.encode() in bytes_of(p)]
        for path in self._with[word]:
            self.consulted.add(absolute(path))
            yield bytes_of(path).decode(errors="replace")

    def mentions(self, name: str) -> int:
        """Returns how often the project writes the name of something that it defines."""
        return self._index.words.get(name, 0)

    @property
    def trains(self) -> bool:
        """Whether some file starts a backward pass, or hands a model to a trainer."""
        return bool(self._index.trains)

    def is_imported(self, path: str) -> bool:
        """Returns whether some file imports one of this name, or from one."""
        *folders, name = path.rpartition(".")[0].replace("\\", "/").split("/")
        return (folders[-1] if name == "__init__" and folders else name) in self._index.imported

    @property
    def is_closed(self) -> bool:
        """Whether what is used is named: nothing is imported or made by a name put together."""
        return not self._index.by_name

    @property
    def makes_by_path(self) -> bool:
        """Whether a configuration may name a class that no code names."""
        return self._index.by_path

    def reaches(self, path: str, name: str) -> bool | None:
        """Returns whether the project's training reaches a function, a class or a file's own code.

        None where that cannot be said: nothing trains, or things are made by name.

        Args:
            path: The file, as the user would name it.
            name: The function or class at its margin; empty for the code between them.
        """
        self.consulted |= {absolute(file) for file in self._index.trains}
        if (path, name) in self._reach.reached:
            return True
        if not self.trains:
            return None
        return False if self.is_closed or (path, name) in self._reach.unused else None

    def is_left_over(self, path: str) -> bool:
        """Returns whether no file can have imported one, as far as import statements say."""
        return self.is_closed and not self.is_imported(path)

    def is_first(self, path: str, word: str, never: re.Pattern[str]) -> bool:
        """Returns whether a file is the first with a word, and no file has what must not be there.

        Args:
            path: The file, as the user would name it.
            word: What the files in question hold.
            never: What no file of the project may hold.
        """
        key = (word, never.pattern)
        if key not in self._first:
            first = ""
            for file in sorted(self.paths.values()):
                content = bytes_of(file).decode(errors="replace")
                if never.search(content):
                    first = ""
                    break
                first = first or (file if word in content and ".backward(" in content else "")
            self._first[key] = first
        return self._first[key] == path

    @property
    def _callers(self) -> dict[str, list[str]]:
        return self._index.callers

    def prepare(self) -> None:
        """Reads what every process would read for itself."""
        _ = self._counted

    @cached_property
    def _counted(self) -> _Counted:
        """What is counted in all files, from the last check where nothing of it has changed."""
        paths = list(self.paths.values())
        found = self.kept.load(paths) if self.kept is not None else None
        if found is None:
            index = self._make_index()
            reach = reach_of_training(paths, is_named_for_evaluation)
            found = _Counted(index, reach, self._make_settings())
            if self.kept is not None:
                self.kept.save(paths, found)
        return found

    @property
    def _index(self) -> _Index:
        return self._counted.index

    @property
    def _reach(self) -> Reach:
        return self._counted.reach

    @property
    def _settings(self) -> dict[str, set[float]]:
        return self._counted.settings

    def _make_index(self) -> _Index:
        """Returns where what the project defines is called, and how often it is named."""
        definitions = {
            path: Counter(_DEFINED.findall(b"\n" + bytes_of(path))) for path in self.paths.values()
        }
        defined: set[bytes] = set().union(*definitions.values())
        index = _Index()
        imported: set[bytes] = set()
        for path, here in definitions.items():
            data = bytes_of(path)
            if is_training_code(data):
                index.trains.add(path)
            index.by_name = index.by_name or _imports_by_name(data)
            index.by_path = index.by_path or _makes_by_path(data)
            for line in _IMPORTS.findall(b"\n" + data):
                imported.update(line.translate(_WORDS).split())
            # A word that is called ends in its parenthesis.
            words = Counter(data.translate(_WORDS).replace(b"(", b"( ").split())
            for word, number in words.items():
                name = word[:-1] if word.endswith(b"(") else word
                if name not in defined:
                    continue
                told = name.decode(errors="replace")
                index.words[told] = index.words.get(told, 0) + number
                if word is not name and number > here[name]:
                    index.callers.setdefault(told, []).append(path)
                elif word is name and told not in _COMMON:
                    index.users.setdefault(told, []).append(path)
        index.imported = {word.decode(errors="replace") for word in imported}
        return index

    def _make_settings(self) -> dict[str, set[float]]:
        """Returns the defaults of options and of fields of settings, by name."""
        found: dict[str, set[float]] = {}
        for path in self.paths.values():
            for name, number in _settings_in(bytes_of(path)):
                found.setdefault(name.replace("-", "_"), set()).add(_number(number))
        return found


def _settings_in(data: bytes) -> list[tuple[str, str]]:
    """Returns the options and the fields of settings in a file, with their numbers."""
    if b"add_argument" not in data and b"@dataclass" not in data:
        return []
    content = data[:_LONGEST_SETTINGS].decode(errors="replace")
    pairs: list[tuple[str, str]] = _OPTION.findall(content)
    if "@dataclass" in content:
        pairs += _FIELD.findall(content)
    return pairs


def _imports_by_name(data: bytes) -> bool:
    """Returns whether a file imports or makes something by a name put together at run time."""
    return (
        any(word in data for word in _BY_NAME)
        or _MADE_BY_NAME.search(data) is not None
        or evaluates_name(data)
    )


def _makes_by_path(data: bytes) -> bool:
    """Returns whether a file may make a class that no code names."""
    return any(word in data for word in _BY_PATH) or evaluates_name(data)


def _read(path: str, project: Project) -> Code | None:
    try:
        text = Text(path, decode(path, read_bytes(path, PYTHON_LIMIT), python=True).content)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Code.parse(text, project, outline=True)
    except SourceError:
        return None


def _calls_in(path: str, name: str) -> Iterator[ast.Call]:
    """Yields the calls of something in a file, each parsed by itself."""
    data = bytes_of(path)
    for match in re.finditer(rb"(?<!def )(?<!class )\b%s\(" % name.encode(), data):
        depth = 0
        for token in _BRACKETS.finditer(data, match.end() - 1, match.end() + _LONGEST_CALL):
            depth += {b"(": 1, b"[": 1, b"{": 1}.get(token[0], 0)
            depth -= {b")": 1, b"]": 1, b"}": 1}.get(token[0], 0)
            if depth == 0:
                yield from _parsed_call(data[match.start() : token.end()])
                break


def _parsed_call(written: bytes) -> Iterator[ast.Call]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call = ast.parse(written, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    if isinstance(call, ast.Call):
        yield call


def _member(code: Code, members: tuple[str, ...]) -> Function | Class | Value | None:
    """Returns what names lead to in a file: something it defines, or a part of that."""
    first, *others = members
    cls = code.classes.get(first)
    held = code.globals.get(first) if cls is None else None
    if not others:
        if cls is not None or held is None:
            return cls
        return held.function or (held if _is_constant(held) or held.cls is not None else None)
    cls = cls or (held.cls if held is not None else None)
    if cls is None or len(others) > 1:
        return None
    return cls.method(others[0]) or _attribute(code, cls, others[0])


def _attribute(code: Code, cls: Class, name: str) -> Value | None:
    """Returns a constant that a class sets once and for all."""
    code.ready(cls)
    for ancestor in cls.line_of_descent():
        assigned = ancestor.attributes.get(name)
        if assigned:
            return assigned[0] if len(assigned) == 1 and _is_constant(assigned[0]) else None
    return None


def _is_constant(value: Value) -> bool:
    """Returns whether a name of a module is a number, a text or a few of them."""
    if value.const is not None:
        return True
    return value.items is not None and all(item.const is not None for item in value.items)


def _number(text: str) -> float:
    if text.startswith("float("):
        return float("-inf") if "-" in text else float("inf")
    return float(text.replace("_", ""))
