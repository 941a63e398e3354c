"""The functions and classes of a module."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
