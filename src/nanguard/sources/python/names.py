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


class Names:
    """The names a module imports, and what they stand for."""

    def __init__(self, statements: Iterable[ast.stmt]) -> None:
        self.imports: dict[str, str] = {}
        for node in statements:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.asname:
                        self.imports[alias.asname] = alias.name
                    else:
                        top = alias.name.partition(".")[0]
                        self.imports[top] = top
            elif isinstance(node, ast.ImportFrom):
                prefix = "." * node.level + (node.module or "")
                for alias in node.names:
                    self.imports[alias.asname or alias.name] = f"{prefix}.{alias.name}"
        self.roots = {path.lstrip(".").partition(".")[0] for path in self.imports.values()}

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


def canonical(path: str) -> str:
    """Returns the one spelling of a path that has several."""
    if path.startswith("numpy."):
        return "numpy." + path.rpartition(".")[2]
    for many, one in _SAME:
        if path.startswith(many):
            return one + path[len(many) :]
    return path
