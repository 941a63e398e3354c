"""Where the names of a project come from: imports, followed through files that pass names on.

A file is not parsed for this: what it defines and imports is found line by line, once, so that a
package whose ``__init__`` takes everything from a hundred modules costs no more than its lines.
"""

from __future__ import annotations

import ast
import os
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from nanguard.check.code.scopes import ImportedNames
from nanguard.errors import SourceError
from nanguard.source.text import NOTEBOOK_LIMIT, PYTHON_LIMIT, Notebook, read_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

_DEFINED = re.compile(
    rb"^(?:(?:async[ \t]+)?def[ \t]+(\w+)|class[ \t]+(\w+)|(\w+)[ \t]*(?::[^=\n]+)?=[^=])",
    re.MULTILINE,
)
_WITHIN = re.compile(
    rb"^[ \t]+(?:(?:async[ \t]+)?def[ \t]+(\w+)|class[ \t]+(\w+)|(\w+)[ \t]*(?::[^=\n]+)?=[^=])",
    re.MULTILINE,
)
_IMPORT = re.compile(
    rb"^[ \t]*((?:from[ \t]+[.\w]+[ \t]+import[ \t]*"
    rb"(?:\((?:[\w\s,]|#[^\n]*\n)*\)|(?:[^\\\n;]|\\\r?\n)*)|import[ \t]+[\w., \t]+))",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class NamePlace:
    """Where something is defined.

    Attributes:
        path: The file's absolute path.
        members: The names that lead to it in that file.
        through: The files that pass it on.
    """

    path: str
    members: tuple[str, ...]
    through: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Passed:
    """What a file defines and imports, by name."""

    defined: frozenset[str]
    within: frozenset[str]
    names: ImportedNames


class Modules:
    """The files of a project as modules.

    Args:
        paths: Their absolute paths.
    """

    def __init__(self, paths: Collection[str]) -> None:
        self._paths = paths
        self._found: dict[tuple[str, int, tuple[str, ...]], tuple[str, int] | None] = {}
        self._passed: dict[str, _Passed] = {}
        self._sources: dict[tuple[str, str], NamePlace | None] = {}

    def place(self, importer: str, up: int, parts: tuple[str, ...]) -> NamePlace | None:
        """Returns where a dotted name is defined; None if that is no file of the project.

        Args:
            importer: The absolute path of the file in which the name is used.
            up: How many dots the import begins with.
            parts: The parts of the dotted name, the member's included.
        """
        return self._place(importer, up, parts, set())

    def _place(
        self, importer: str, up: int, parts: tuple[str, ...], asked: set[tuple[str, str]]
    ) -> NamePlace | None:
        module = self._module(importer, up, parts)
        if module is None:
            return None
        path, used = module
        if used == len(parts) and len(parts) > 1:
            # A package may give a class the name of the file that holds it.
            package = self._module(importer, up, parts[:-1])
            if package is not None and package[1] == len(parts) - 1:
                path, used = package
        if used == len(parts) or path == importer:
            return None
        first, *others = parts[used:]
        source = self._source(path, first, asked)
        if source is None:
            return None
        return NamePlace(source.path, (*source.members, *others), source.through)

    def _source(self, path: str, name: str, asked: set[tuple[str, str]]) -> NamePlace | None:
        """Returns where a name of a module is defined; each file is asked once for it."""
        key = (path, name)
        if key in self._sources:
            return self._sources[key]
        if key in asked:
            return None
        outermost = not asked
        asked.add(key)
        place = self._look_up(path, name, asked)
        # Whoever was asked in the midst of a circle may not have heard everybody.
        if place is not None or outermost:
            self._sources[key] = place
        return place

    def _look_up(self, path: str, name: str, asked: set[tuple[str, str]]) -> NamePlace | None:
        passed = self.passed(path)
        if name in passed.defined:
            return NamePlace(path, (name,))
        found: NamePlace | None = None
        origin = passed.names.origins.get(name)
        if origin is not None:
            found = self._place(path, *origin, asked)
        elif name in passed.within:
            return NamePlace(path, (name,))
        else:
            starred = (
                self._place(path, up, (*module, name), asked) for up, module in passed.names.stars
            )
            found = next((place for place in starred if place is not None), None)
        return NamePlace(found.path, found.members, (path, *found.through)) if found else None

    def passed(self, path: str) -> _Passed:
        """Returns what a file defines and imports."""
        known = self._passed.get(path)
        if known is None:
            known = self._passed[path] = _passed_on(bytes_of(path))
        return known

    def _module(self, importer: str, up: int, parts: tuple[str, ...]) -> tuple[str, int] | None:
        """Returns the file that holds a name, and how many parts of the name lead to it."""
        folder = importer.rpartition("/")[0]
        key = (folder, up, parts)
        if key not in self._found:
            self._found[key] = self._look(folder, up, parts)
        return self._found[key]

    def _look(self, folder: str, up: int, parts: tuple[str, ...]) -> tuple[str, int] | None:
        for _ in range(up - 1):
            folder = folder.rpartition("/")[0]
        while folder.startswith(self._top):
            found = self._below(folder, parts, 0 if up else 1)
            if found is not None or up:
                return found
            if folder == self._top:
                break
            folder = folder.rpartition("/")[0]
        # All files may lie in one package, which is then imported by its own name.
        above, _, package = self._top.rpartition("/")
        return self._below(above, parts, 1) if package and parts[:1] == (package,) else None

    def _below(self, place: str, parts: tuple[str, ...], least: int) -> tuple[str, int] | None:
        """Returns the file below a folder that leads furthest, by at least some parts of a name.

        The package that a file lies in is meant by dots alone, never by the name of something else.
        """
        for used in range(len(parts), least - 1, -1):
            stem = "/".join((place, *parts[:used]))
            for path in (f"{stem}.py", f"{stem}/__init__.py"):
                if path in self._paths and (used or path.endswith("/__init__.py")):
                    return path, used
        return None

    @cached_property
    def _top(self) -> str:
        """The folder that all files lie in."""
        folders = {path.rpartition("/")[0] for path in self._paths}
        return os.path.commonpath(list(folders)) if folders else ""


def bytes_of(path: str) -> bytes:
    """Returns the code that a file of the project holds; nothing if it cannot be read."""
    try:
        if path.endswith(".ipynb"):
            about = os.stat(path)  # noqa: PTH116 - a Path for each is slow
            return _cells_of(path, about.st_mtime_ns, about.st_size)
        return read_bytes(path, PYTHON_LIMIT)
    except (SourceError, OSError):
        return b""


@lru_cache(maxsize=256)
def _cells_of(path: str, changed: int, size: int) -> bytes:
    """Returns the code of a notebook, read again when it has changed."""
    content = read_bytes(path, NOTEBOOK_LIMIT).decode("utf-8", "replace")
    return Notebook.read(path, content).code.content.encode()


@lru_cache(maxsize=20_000)
def absolute(path: str) -> str:
    """Returns the absolute path of a file, with the slashes of a module's path."""
    return os.path.abspath(path).replace("\\", "/")  # noqa: PTH100 - a Path for each is slow


def _passed_on(data: bytes) -> _Passed:
    return _Passed(
        frozenset(_named(_DEFINED, data)),
        frozenset(_named(_WITHIN, data)),
        ImportedNames(_statements(_IMPORT.findall(data))),
    )


def _named(pattern: re.Pattern[bytes], data: bytes) -> Iterator[str]:
    for names in pattern.findall(data):
        yield b"".join(names).decode(errors="replace")


def _statements(lines: list[bytes]) -> list[ast.stmt]:
    """Returns import statements; lines of a text that only look like one are passed over."""
    try:
        return ast.parse(b"\n".join(lines)).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        if len(lines) <= 1:
            return []
    return [statement for line in lines for statement in _statements([line])]
