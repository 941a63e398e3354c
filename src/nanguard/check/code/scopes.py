"""The functions and classes of a module, and what its names stand for."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

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
