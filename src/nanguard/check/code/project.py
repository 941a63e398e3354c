"""The Python files of a project: what an imported name stands for, and which torch is asked for.

A file is judged together with those it imports from, one step deep: functions there are read as
they stand in their own file. So what is known about a file does not depend on the order in which
files are read, and each file is read at most twice in a process.
"""

from __future__ import annotations

import ast
import os
import re
import warnings
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanguard.check.code.code import Code
from nanguard.check.code.scopes import Class, Function
from nanguard.errors import SourceError
from nanguard.source.text import PYTHON_LIMIT, Text, decode, read_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

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
_PASSED_ON = 5  # files through which a name may be passed on before nobody looks further
_MOST_CALLERS = 40  # files that are searched for the calls of one class or function
_DEFINED = re.compile(rb"^[ \t]*(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)", re.MULTILINE)
_CALLED = re.compile(rb"(?<!def )(?<!class )\b(\w+)[ \t]*\(")
_WORD = re.compile(rb"[A-Za-z_]\w*")
_IMPORTS = re.compile(rb"^[ \t]*(?:from|import)[ \t]+([^\n#]+)", re.MULTILINE)
_TRAINS = re.compile(rb"\.backward\(|[Tt]rainer\w*\(|\.fit\(")
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
_LONGEST_SETTINGS = 400_000  # characters; a file of settings is shorter


@dataclass(slots=True)
class _Index:
    """What is called and named in a project, by name.

    Attributes:
        callers: The files that call something.
        words: How often something is named, its definition counted.
        trains: The files that start a backward pass, or hand a model to a trainer.
        imported: The words of all import statements.
    """

    callers: dict[str, list[str]] = field(default_factory=dict)
    words: dict[str, int] = field(default_factory=dict)
    trains: set[str] = field(default_factory=set)
    imported: set[str] = field(default_factory=set)


class Project:
    """The files that belong together, by what they are called.

    Args:
        paths: The Python files, as the user would name them.

    Attributes:
        paths: The files, by their absolute paths.
        consulted: The files that were looked into since it was emptied, but for the one at hand.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self.paths: dict[str, str] = {_absolute(path): path for path in paths}
        self.consulted: set[str] = set()
        self._outlines: OrderedDict[str, Code | None] = OrderedDict()
        self._lines = 0
        self._modules: dict[tuple[str, int, tuple[str, ...]], tuple[str, int] | None] = {}
        self._calls: dict[str, list[ast.Call]] = {}
        self._first: dict[tuple[str, str], str] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Gives another process the files, and nothing that was read of them."""
        return {"paths": self.paths}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes over the files that another process knows."""
        self.__init__(())  # type: ignore[misc]
        self.paths = state["paths"]

    def find(
        self, importer: str, up: int, parts: tuple[str, ...], depth: int = _PASSED_ON
    ) -> Function | Class | Value | None:
        """Returns what a dotted name stands for; None if it is of no file of the project.

        Args:
            importer: The file in which the name is used.
            up: How many dots the import begins with.
            parts: The parts of the dotted name, the member's included.
            depth: Through how many files the name may be passed on.
        """
        module = self._module(importer, up, parts)
        if module is None:
            return None
        path, used = module
        members = parts[used:]
        if not members or path == _absolute(importer):
            return None
        code = self.outline(path)
        if code is None:
            return None
        return self._member(code, members, depth)

    def outline(self, path: str) -> Code | None:
        """Returns a file of the project, read alone; None if it cannot be read.

        Args:
            path: The file's absolute path.
        """
        self.consulted.add(path)
        if path in self._outlines:
            self._outlines.move_to_end(path)
            return self._outlines[path]
        code = _read(self.paths[path])
        self._outlines[path] = code
        if code is not None:
            self._lines += code.length
            self._link(code)
        while self._lines > _KEPT_LINES and len(self._outlines) > 1:
            _, oldest = self._outlines.popitem(last=False)
            self._lines -= oldest.length if oldest is not None else 0
        return code

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
        self.consulted |= {_absolute(path) for path in self._callers.get(name, ())}
        return self._calls[name]

    def callers(self, name: str) -> list[str]:
        """Returns the files that call something of this name, as the user would name them."""
        self.consulted |= {_absolute(path) for path in self._callers.get(name, ())}
        return self._callers.get(name, [])

    def holds(self, path: str, word: str) -> bool:
        """Returns whether a word stands in a file of the project."""
        self.consulted.add(_absolute(path))
        return word.encode() in _bytes(path)

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
                content = _bytes(file).decode(errors="replace")
                if never.search(content):
                    first = ""
                    break
                first = first or (file if word in content and ".backward(" in content else "")
            self._first[key] = first
        return self._first[key] == path

    def _member(
        self, code: Code, members: tuple[str, ...], depth: int
    ) -> Function | Class | Value | None:
        first, *others = members
        cls = code.classes.get(first)
        if cls is not None:
            return (cls.method(others[0]) if len(others) == 1 else None) if others else cls
        held = code.globals.get(first)
        if held is not None and not others:
            return held.function or (held if _is_constant(held) else None)
        origin = code.names.origins.get(first)
        if origin is None or depth <= 0:
            return self._star(code, members, depth)
        return self.find(code.text.path, origin[0], (*origin[1], *others), depth - 1)

    def _star(
        self, code: Code, members: tuple[str, ...], depth: int
    ) -> Function | Class | Value | None:
        """Looks for a name in what a file imports with a star."""
        if depth <= 0:
            return None
        starred = (
            self.find(code.text.path, up, (*module, *members), depth - 1)
            for up, module in code.names.stars
        )
        return next((found for found in starred if found is not None), None)

    def _link(self, code: Code) -> None:
        """Gives the classes of a file their ancestors in other files."""
        for cls in code.classes.values():
            for base in cls.node.bases:
                origin = code.names.origin(base)
                found = self.find(code.text.path, *origin) if origin is not None else None
                if isinstance(found, Class) and found not in cls.parents and found is not cls:
                    cls.parents.append(found)

    def _module(self, importer: str, up: int, parts: tuple[str, ...]) -> tuple[str, int] | None:
        """Returns the file that holds a name, and how many parts of the name lead to it."""
        folder = _absolute(importer).rpartition("/")[0]
        key = (folder, up, parts)
        if key not in self._modules:
            self._modules[key] = self._look(folder, up, parts)
        return self._modules[key]

    def _look(self, folder: str, up: int, parts: tuple[str, ...]) -> tuple[str, int] | None:
        for _ in range(up - 1):
            folder = folder.rpartition("/")[0]
        while folder.startswith(self._top):
            found = self._below(folder, parts)
            if found is not None or up or folder == self._top:
                return found
            folder = folder.rpartition("/")[0]
        return None

    def _below(self, place: str, parts: tuple[str, ...]) -> tuple[str, int] | None:
        for used in range(len(parts), -1, -1):
            stem = "/".join((place, *parts[:used]))
            for path in (f"{stem}.py", f"{stem}/__init__.py"):
                if path in self.paths and (used or path.endswith("/__init__.py")):
                    return path, used
        return None

    @cached_property
    def _top(self) -> str:
        """The folder that all files lie in."""
        folders = [path.rpartition("/")[0] for path in self.paths]
        return os.path.commonpath(folders) if folders else ""

    @property
    def _callers(self) -> dict[str, list[str]]:
        return self._index.callers

    @cached_property
    def _index(self) -> _Index:
        """Where what the project defines is called, and how often it is named."""
        defined: set[bytes] = set()
        for path in self.paths.values():
            defined |= set(_DEFINED.findall(_bytes(path)))
        index = _Index()
        for path in self.paths.values():
            data = _bytes(path)
            if _TRAINS.search(data):
                index.trains.add(path)
            for line in _IMPORTS.findall(data):
                index.imported |= {w.decode(errors="replace") for w in _WORD.findall(line)}
            for name in defined.intersection(_CALLED.findall(data)):
                index.callers.setdefault(name.decode(errors="replace"), []).append(path)
            for name, number in Counter(_WORD.findall(data)).items():
                if name in defined:
                    word = name.decode(errors="replace")
                    index.words[word] = index.words.get(word, 0) + number
        return index

    @cached_property
    def _settings(self) -> dict[str, set[float]]:
        """The defaults of options and of fields of settings, by name."""
        found: dict[str, set[float]] = {}
        for path in self.paths.values():
            data = _bytes(path)
            if b"add_argument" not in data and b"@dataclass" not in data:
                continue
            content = data[:_LONGEST_SETTINGS].decode(errors="replace")
            pairs = _OPTION.findall(content)
            if "@dataclass" in content:
                pairs += _FIELD.findall(content)
            for name, number in pairs:
                found.setdefault(name.replace("-", "_"), set()).add(_number(number))
        return found


def _read(path: str) -> Code | None:
    try:
        text = Text(path, decode(path, read_bytes(path, PYTHON_LIMIT), python=True).content)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Code.parse(text, outline=True)
    except SourceError:
        return None


def _calls_in(path: str, name: str) -> Iterator[ast.Call]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(_bytes(path))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            func = node.func
            if getattr(func, "attr", getattr(func, "id", "")) == name:
                yield node


def _bytes(path: str) -> bytes:
    try:
        return read_bytes(path, PYTHON_LIMIT)
    except SourceError:
        return b""


def _is_constant(value: Value) -> bool:
    """Returns whether a name of a module is a number, a text or a few of them."""
    if value.const is not None:
        return True
    return value.items is not None and all(item.const is not None for item in value.items)


def _number(text: str) -> float:
    if text.startswith("float("):
        return float("-inf") if "-" in text else float("inf")
    return float(text.replace("_", ""))


@lru_cache(maxsize=20_000)
def _absolute(path: str) -> str:
    return os.path.abspath(path).replace("\\", "/")  # noqa: PTH100 - a Path for each is slow
