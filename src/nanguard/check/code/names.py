"""What a name stands for: imports, aliases, and the one spelling of a dotted path."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

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
_USUAL = {"torch": "torch", "nn": "torch.nn", "F": "torch.nn.functional", "np": "numpy"}


class Names:
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
