"""Whether a gradient can come back to a value: what its function does with it, up to the last use.

Numbers that are sampled from, compared, counted or detached are read, and no gradient comes back
from there. A place whose every use ends so may give an infinite derivative without harm: nobody
asks for it. Uses are followed through names, through operations of torch, into functions of the
file and back to where those are called; what cannot be followed counts as a use that wants a
gradient.
"""

from __future__ import annotations

import ast
import math
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from nanguard.check.code.training import Training, is_backward

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code

# Methods and functions whose result carries no gradient. Rounding is none of them: its gradient is
# 0, and 0 times an infinite derivative is NaN.
_ENDS = frozenset(
    {
        "detach", "item", "tolist", "numpy", "data", "argmax", "argmin", "argsort", "multinomial",
        "bernoulli", "isnan", "isinf", "isfinite", "any", "all", "nonzero", "count_nonzero",
        "searchsorted", "bucketize", "long", "int", "bool", "byte", "shape", "size", "dim", "ndim",
        "numel", "dtype", "device", "bincount", "histc", "eq", "ne", "lt", "le", "gt", "ge",
        "allclose", "equal", "isclose", "requires_grad",
    }
)  # fmt: skip
# Those of them that leave the numbers as they are.
_CUTS = frozenset({"detach", "data"})
# The same as functions of Python.
_READS = frozenset({"int", "float", "bool", "len", "print", "isinstance", "str", "range"})
# Torch functions that ask for gradients, and those that hand a value to somebody else.
_WANTS = re.compile(r"backward|grad|checkpoint|distributed|save|jit|vmap")
_DRAWS = frozenset({"sample", "sample_n"})
# Distributions over countable things, whoever wrote them: what they draw has no derivative.
_DISCRETE = re.compile(r"(?!\w*(Relaxed|Gumbel))\w*(Categorical|Bernoulli|Multinomial)")
_DISTRIBUTION = re.compile(r"torch\.distributions\.(\w+\.)*[A-Z]\w*")
# How many names, calls and returns are followed in all.
_MOST_STEPS = 40


@dataclass(frozen=True, slots=True)
class _Tracked:
    """An expression that holds the value, or something made from it.

    Attributes:
        node: The expression.
        place: Which item of it, where it is a tuple; None if it is the value itself.
        is_distribution: Whether it is a distribution with the value for a parameter.
    """

    node: ast.AST
    place: int | None = None
    is_distribution: bool = False


def is_only_read(code: Code, node: ast.AST | None, *, numbers: bool = False) -> bool:
    """Returns whether every use of an expression's value is one that no gradient comes back from.

    Args:
        code: The file.
        node: The expression.
        numbers: Whether the value itself does harm, which goes on where it is detached.
    """
    if not isinstance(node, ast.expr):
        return False
    return _Uses(code, numbers).all_read(_Tracked(node))


@dataclass(slots=True)
class _Uses:
    """The uses of one value, as far as they have been followed."""

    code: Code
    numbers: bool = False
    seen: set[tuple[int, bool]] = field(default_factory=set)

    def all_read(self, tracked: _Tracked) -> bool:
        """Returns whether a value ends without a gradient wherever it goes."""
        key = (id(tracked.node), tracked.is_distribution)
        if key in self.seen:
            return True  # a loop: nothing new comes of it
        self.seen.add(key)
        if len(self.seen) > _MOST_STEPS:
            return False
        while True:
            parent = self.code.parents.get(tracked.node)
            if parent is None:
                return False
            if isinstance(parent, ast.stmt):
                return self._statement(tracked, parent)
            if self._ends(tracked, parent):
                return True
            handed = self._handed_on(tracked, parent)
            if handed is not None:
                return handed
            above = self._above(tracked, parent)
            if above is None:
                return False
            tracked = above

    def _ends(self, tracked: _Tracked, parent: ast.AST) -> bool:
        """Returns whether an expression takes no gradient from its part."""
        node = tracked.node
        if isinstance(parent, ast.Compare):
            return True
        if isinstance(parent, ast.Subscript):
            return node is parent.slice
        if isinstance(parent, ast.IfExp):
            return node is parent.test
        if isinstance(parent, ast.Attribute):
            if self.numbers and parent.attr in _CUTS:
                return False
            return parent.attr in (_DRAWS if tracked.is_distribution else _ENDS)
        if not isinstance(parent, ast.Call):
            return False
        made = self.code.values.get(parent)
        if made is not None and made.node is parent and not made.grad:
            return True  # where none is recorded
        if node is parent.func:
            return False
        path = self.code.names.path(parent.func)
        if path.startswith("torch."):
            return path.removeprefix("torch.") in _ENDS
        return isinstance(parent.func, ast.Name) and parent.func.id in _READS

    def _above(self, tracked: _Tracked, parent: ast.AST) -> _Tracked | None:
        """Returns what an expression makes of its part; None where that cannot be followed."""
        node = tracked.node
        if isinstance(parent, (ast.BinOp, ast.UnaryOp, ast.IfExp, ast.keyword)):
            return replace(tracked, node=parent)
        if isinstance(parent, ast.Tuple) and tracked.place is None:
            return replace(tracked, node=parent, place=parent.elts.index(node))  # type: ignore[arg-type]
        if isinstance(parent, ast.Subscript):
            picked = parent.slice.value if isinstance(parent.slice, ast.Constant) else None
            if tracked.place is not None and picked != tracked.place:
                return None
            return replace(tracked, node=parent, place=None)
        if tracked.place is not None:
            return None
        if isinstance(parent, ast.Attribute):
            return None if _WANTS.search(parent.attr) else _Tracked(parent)
        if isinstance(parent, ast.Call):
            return self._called(tracked, parent)
        return None

    def _called(self, tracked: _Tracked, call: ast.Call) -> _Tracked | None:
        if tracked.node is call.func:
            # A method of the value: what it gives back is made from it.
            return _Tracked(call)
        path = self.code.names.path(call.func)
        name = path or getattr(call.func, "id", getattr(call.func, "attr", ""))
        if _DISTRIBUTION.fullmatch(path) or _DISCRETE.fullmatch(name.rpartition(".")[2]):
            return _Tracked(call, is_distribution=True)
        if path.startswith("torch.") and path.count(".") == 1 and not _WANTS.search(path):
            return _Tracked(call)
        return _Tracked(call) if self._is_function_elsewhere(call) else None

    def _is_function_elsewhere(self, call: ast.Call) -> bool:
        """Returns whether a plain function of another file is called, which gives back a result."""
        callee = Training.of(self.code).callees.get(id(self.code.values.get(call)))
        if callee is None or callee.home is self.code or callee.cls is not None:
            return False
        if _WANTS.search(callee.name) or any(map(is_backward, callee.events)):
            return False
        return bool(callee.returns)

    def _handed_on(self, tracked: _Tracked, call: ast.AST) -> bool | None:
        """Returns whether a function of the file only reads what it is given; None for others."""
        training = Training.of(self.code)
        made = self.code.values.get(call)
        callee = training.callees.get(id(made))
        if made is None or callee is None or callee.home is not self.code:
            return None
        if not isinstance(call, ast.Call) or tracked.node is call.func or tracked.place is not None:
            return None
        given = tracked.node.value if isinstance(tracked.node, ast.keyword) else tracked.node
        value = self.code.values.get(given)
        for name in callee.parameters:
            if value is not None and training.argument(made, callee, name) is value:
                uses = [*_loads(callee.node, name)]
                return all(self.all_read(replace(tracked, node=use)) for use in uses)
        return False

    def _statement(self, tracked: _Tracked, statement: ast.stmt) -> bool:
        if isinstance(statement, (ast.If, ast.While, ast.Assert)):
            return tracked.node is statement.test
        if isinstance(statement, ast.Return):
            return self._returned(tracked, statement)
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target = statement.targets[0]
            if isinstance(target, ast.Tuple) and tracked.place is not None:
                if any(isinstance(part, ast.Starred) for part in target.elts):
                    return False
                target = target.elts[tracked.place]
                tracked = replace(tracked, place=None)
        elif isinstance(statement, (ast.AugAssign, ast.AnnAssign)):
            target = statement.target
        else:
            return False
        if not isinstance(target, ast.Name):
            return False
        uses = [*self._reads(statement, target.id)]
        return bool(uses) and all(self.all_read(replace(tracked, node=use)) for use in uses)

    def _reads(self, statement: ast.stmt, name: str) -> Iterator[ast.Name]:
        """Yields where a name is read after a statement has set it, in the same function."""
        scope: ast.AST = self.code.tree
        begins = math.inf  # where the outermost loop around it begins
        for outer in self.code.ancestors(statement):
            if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
                scope = outer
                break
            if isinstance(outer, (ast.For, ast.While)):
                begins = outer.lineno
        last = statement.end_lineno or statement.lineno
        ends = self._set_again(statement, name)
        for node in _loads(scope, name):
            again = ends == math.inf and begins <= node.lineno
            if last < node.lineno <= ends or again:
                yield node

    def _set_again(self, statement: ast.stmt, name: str) -> float:
        """Returns the last line of the statement that gives a name something else for certain."""
        block: ast.AST = statement
        for outer in self.code.ancestors(statement):
            for body in (getattr(outer, part, ()) for part in ("body", "orelse", "finalbody")):
                if not isinstance(body, list) or block not in body:
                    continue
                for later in body[body.index(block) + 1 :]:
                    if isinstance(later, ast.Assign) and any(
                        isinstance(target, ast.Name) and target.id == name
                        for target in later.targets
                    ):
                        return later.end_lineno or later.lineno
            if isinstance(outer, (ast.For, ast.While, ast.FunctionDef, ast.AsyncFunctionDef)):
                break
            block = outer
        return math.inf

    def _returned(self, tracked: _Tracked, statement: ast.Return) -> bool:
        """Returns whether every call of the function ends without a gradient."""
        function = Training.of(self.code).owner(statement)
        calls = Training.of(self.code).callers(function)
        project, path = self.code.project, self.code.text.path
        if not function.name or not calls or function.name in ("forward", "__call__"):
            return False
        if project is not None and any(other != path for other in project.callers(function.name)):
            return False
        return all(
            call.node is not None and self.all_read(replace(tracked, node=call.node))
            for call in calls
        )


def _loads(scope: ast.AST, name: str) -> Iterator[ast.Name]:
    """Yields where a name is read."""
    for node in ast.walk(scope):
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
            yield node
