"""What every part of the reader of a function shares: where it is, and what it knows there."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from nanguard.check.code.operations import known
from nanguard.check.code.precision import half_of
from nanguard.check.code.values import NO_KINDS, Value

if TYPE_CHECKING:
    from nanguard.check.code.code import Code
    from nanguard.check.code.scopes import Class, Function

# Expressions deeper than this are not followed.
_MAX_DEPTH = 120


class Reader:
    """Reads one function.

    Attributes:
        code: The module.
        scope: The function.
        env: What each name holds here.
        grad: Whether gradients are recorded here.
        autocast: The type of the autocast region, if any.
        guards: What the conditions around this place have looked at.
        loops: The loops around this place.
    """

    def __init__(self, code: Code, scope: Function, env: dict[str, Value]) -> None:
        self.code = code
        self.scope = scope
        self.env = env
        self.grad = scope.grad
        self.autocast = ""
        self.guards: frozenset[str] = NO_KINDS
        self.loops: list[ast.AST] = []
        self.depth = 0

    def value(self, node: ast.expr) -> Value:
        """Returns what is known about an expression, and remembers it."""
        self.depth += 1
        try:
            if self.depth > _MAX_DEPTH:
                return Value(node=node)
            reader = getattr(self, "_" + type(node).__name__.lower(), None)
            value = reader(node) if reader is not None else self.parts(node)
        finally:
            self.depth -= 1
        self.code.values[node] = value
        return value

    def parts(self, node: ast.expr) -> Value:
        """Reads what an expression of no particular interest consists of."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child)
        return Value(node=node)

    def make(
        self,
        op: str,
        node: ast.AST,
        inputs: tuple[Value, ...],
        keywords: dict[str, Value] | None = None,
        *,
        event: bool = False,
    ) -> Value:
        """Returns what an operation makes."""
        keywords = keywords or {}
        lo, hi, kinds = known(op, inputs, keywords)
        value = Value(
            lo,
            hi,
            kinds,
            None,
            op,
            inputs,
            keywords,
            node,
            half=half_of(op, inputs, keywords),
            scope=self.scope,
            grad=self.grad,
            guards=self.guards,
            autocast=self.autocast,
        )
        if event:
            self.scope.events.append(value)
        self.code.operations.setdefault(op, []).append(value)
        return value

    def lookup(self, name: str) -> Value | None:
        """Returns what a name holds here, or in the functions and the module around."""
        value = self.env.get(name)
        if value is None:
            scope: Function | None = self.scope
            while scope is not None and value is None:
                value = scope.outer.get(name)
                scope = scope.parent
        if value is None:
            value = self.code.globals.get(name)
        return value

    def class_of(self, value: Value) -> Class | None:
        """Returns the class of the file that a value is an instance of."""
        if value.cls is not None:
            return value.cls
        core = value.core
        return core.cls

    def attribute_of(self, cls: Class, name: str) -> Value | None:
        """Returns what ``self.NAME`` holds, from what the class assigns to it."""
        self.code.ready(cls)
        for ancestor in cls.line_of_descent():
            assigned = ancestor.attributes.get(name)
            if assigned:
                return assigned[0] if len(assigned) == 1 else self.either(assigned)
        method = cls.method(name)
        if method is not None:
            return Value(function=method, name=name)
        return None

    def either(self, values: list[Value]) -> Value:
        """Returns what is known about a value that is one of several."""
        first, *others = values[:4]
        lo, hi = min(v.lo for v in values), max(v.hi for v in values)
        kinds = frozenset().union(*(v.kinds for v in values))
        same = all(v.const == first.const for v in others)
        return Value(
            lo,
            hi,
            kinds,
            first.const if same else None,
            "join",
            tuple(values[:4]),
            node=first.node,
            name=first.name,
            path=first.path,
            cls=next((v.cls for v in values if v.cls), None),
        )
