"""The Python files of a project: what an imported name stands for, and which torch is asked for.

A file is judged together with those it imports from, and these with those they import from: what
they define is read where it stands, and functions only when somebody calls them. Each file is read
at most twice in a process, once for itself and once for the others, however many ask for it.
"""

from __future__ import annotations

import ast
import re
import warnings
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanguard.check.code.code import Code
from nanguard.check.code.project_index import Counted, KeptIndex, ProjectIndex, counted_in
from nanguard.check.code.scopes import Modules, absolute, bytes_of
from nanguard.errors import SourceError
from nanguard.source.text import (
    PYTHON_LIMIT,
    Text,
    decode,
    read_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nanguard.check.code.reach import (
        Reach,
    )
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
_BRACKETS = re.compile(
    rb"[()\[\]{}]|#[^\n]*|\"{3}.*?\"{3}|'{3}.*?'{3}|\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'",
    re.DOTALL,
)
_LONGEST_CALL = 8_000  # characters


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
    def _counted(self) -> Counted:
        return counted_in(list(self.paths.values()), self.kept)

    @property
    def _index(self) -> ProjectIndex:
        return self._counted.index

    @property
    def _reach(self) -> Reach:
        return self._counted.reach

    @property
    def _settings(self) -> dict[str, set[float]]:
        return self._counted.settings


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
