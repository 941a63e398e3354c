"""The functions and classes of a module, and what names stand for: its own, and imported ones."""

from __future__ import annotations

import ast
import os
import re
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from nanguard.errors import SourceError
from nanguard.source.text import NOTEBOOK_LIMIT, PYTHON_LIMIT, Notebook, read_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.values import Value

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(slots=True, eq=False, repr=False)
class Function:
    """A function, a method, or the module's own code.

    Attributes:
        name: What it is called; empty for the module's own code.
        node: Where it is defined.
        cls: The class it is a method of.
        parent: The function it is defined in.
        events: The operations in it, in the order in which they run.
        returns: What it gives back, from each of its return statements.
        parameters: Its parameters, by name.
        grad: Whether gradients are recorded in it, as far as its decorators say.
        state: Whether its body has been read.
        outer: What names hold around it, where it is defined in a function.
        home: The file it stands in.
    """

    name: str
    node: FunctionNode | ast.Module | ast.Lambda
    cls: Class | None = None
    parent: Function | None = None
    events: list[Value] = field(default_factory=list)
    returns: list[Value] = field(default_factory=list)
    parameters: dict[str, Value] = field(default_factory=dict)
    grad: bool = True
    state: str = "new"
    outer: dict[str, Value] = field(default_factory=dict)
    home: Code | None = None


@dataclass(slots=True, eq=False, repr=False)
class Class:
    """A class of the module.

    Attributes:
        name: What it is called.
        node: Where it is defined.
        bases: The dotted paths or names of what it is derived from.
        parents: Those of them that are classes of this module or of another one of the project.
        methods: Its methods, by name.
        attributes: What is assigned to ``self.NAME``, by name.
        home: The file it stands in.
    """

    name: str
    node: ast.ClassDef
    bases: list[str] = field(default_factory=list)
    parents: list[Class] = field(default_factory=list)
    methods: dict[str, Function] = field(default_factory=dict)
    attributes: dict[str, list[Value]] = field(default_factory=dict)
    home: Code | None = None

    def line_of_descent(self) -> list[Class]:
        """Returns the class and its ancestors in the project, nearest first."""
        found: list[Class] = []
        queue = [self]
        while queue and len(found) < 16:
            cls = queue.pop(0)
            if cls not in found:
                found.append(cls)
                queue += cls.parents
        return found

    def method(self, name: str) -> Function | None:
        """Returns a method, its own or one inherited from a class of the project."""
        for cls in self.line_of_descent():
            if name in cls.methods:
                return cls.methods[name]
        return None

    def inherits_elsewhere(self) -> bool:
        """Returns whether it is derived from a class of another file that is not a library's."""
        known = ("torch.", "lightning.", "transformers.")
        for cls in self.line_of_descent():
            names = {parent.name for parent in cls.parents}
            for base in cls.bases:
                if base.rpartition(".")[2] not in (*names, "") and not base.startswith(known):
                    return True
        return False

    def is_module(self) -> bool:
        """Returns whether it is a torch module, as far as this file says."""
        for cls in self.line_of_descent():
            for base in cls.bases:
                last = base.rpartition(".")[2]
                if last in ("Module", "LightningModule", "PreTrainedModel", "Sequential"):
                    return True
                if base.startswith("torch.nn."):
                    return True
        return False


# Paths under which the same thing can be had, and the one we use.
_SAME = (
    ("torch.nn.functional.", "torch."),
    ("torch.special.", "torch."),
    ("torch.linalg.", "torch."),
    ("torch.functional.", "torch."),
    ("torch.Tensor.", "torch."),
    ("lightning.pytorch.", "lightning."),
    ("pytorch_lightning.", "lightning."),
    ("lightning.pytorch", "lightning"),
    ("pytorch_lightning", "lightning"),
    ("torch.optim.adamw.", "torch.optim."),
    ("torch.optim.adam.", "torch.optim."),
    ("torch.nn.modules.", "torch.nn."),
)
# Names that everybody uses for the same thing.
_USUAL = {
    "torch": "torch", "nn": "torch.nn", "F": "torch.nn.functional", "np": "numpy", "math": "math",
}  # fmt: skip


class ImportedNames:
    """The names a module imports, and what they stand for.

    Attributes:
        imports: The dotted path of each imported name.
        origins: For each name, how many folders up its import begins, and the parts of its path.
        stars: The modules all names of which are imported, in the same form.
        roots: The first parts of all paths.
    """

    def __init__(self, statements: Iterable[ast.stmt]) -> None:
        self.imports: dict[str, str] = {}
        self.origins: dict[str, tuple[int, tuple[str, ...]]] = {}
        self.stars: list[tuple[int, tuple[str, ...]]] = []
        for node in statements:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    parts = tuple(alias.name.split("."))
                    self.origins[alias.asname or parts[0]] = (
                        0,
                        parts if alias.asname else parts[:1],
                    )
                    if alias.asname:
                        self.imports[alias.asname] = alias.name
                    else:
                        top = alias.name.partition(".")[0]
                        self.imports[top] = top
            elif isinstance(node, ast.ImportFrom):
                prefix = "." * node.level + (node.module or "")
                module = tuple(node.module.split(".")) if node.module else ()
                for alias in node.names:
                    if alias.name == "*":
                        self.stars.append((node.level, module))
                        continue
                    name = alias.asname or alias.name
                    self.imports[name] = f"{prefix}.{alias.name}"
                    self.origins[name] = (node.level, (*module, alias.name))
        if self.stars:
            self._usual()
        self.roots = {path.lstrip(".").partition(".")[0] for path in self.imports.values()}

    def _usual(self) -> None:
        """Takes the usual short names for what they are: a star may have brought them."""
        for name, path in _USUAL.items():
            self.imports.setdefault(name, path)

    def imported(self, *packages: str) -> bool:
        """Returns whether the module imports one of these packages, or something from one."""
        return any(package in self.roots for package in packages)

    def path(self, node: ast.expr) -> str:
        """Returns the dotted path an expression stands for; empty if it is not an import's."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self.imports:
            return ""
        parts.append(self.imports[node.id])
        return canonical(".".join(reversed(parts)))

    def origin(self, node: ast.expr) -> tuple[int, tuple[str, ...]] | None:
        """Returns where an expression is imported from: folders up, and the parts of its path."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        found = self.origins.get(node.id) if isinstance(node, ast.Name) else None
        return (found[0], (*found[1], *reversed(parts))) if found else None


def canonical(path: str) -> str:
    """Returns the one spelling of a path that has several."""
    if path.startswith("numpy."):
        return "numpy." + path.rpartition(".")[2]
    for many, one in _SAME:
        if path.startswith(many):
            return one + path[len(many) :]
    return path


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
