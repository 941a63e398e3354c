"""Following values through the statements of a function, branch by branch."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from nanguard.check.code.expressions import Expressions
from nanguard.check.code.hints import kinds_of
from nanguard.check.code.scopes import Function
from nanguard.check.code.values import INF, NO_KINDS, Value

if TYPE_CHECKING:
    from collections.abc import Sequence

_ENDS = (ast.Return, ast.Continue, ast.Break, ast.Raise)


class Flow(Expressions):
    """Reads statements in order and keeps what each name holds."""

    def body(self, statements: Sequence[ast.stmt]) -> bool:
        """Reads statements; returns whether what follows them cannot be reached."""
        ended = False
        for statement in statements:
            if not ended:
                ended = self.statement(statement)
        return ended

    def statement(self, node: ast.stmt) -> bool:
        """Reads a statement; returns whether it leaves the block."""
        reader = getattr(self, "_" + type(node).__name__.lower(), None)
        if reader is not None:
            return bool(reader(node))
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child)
        return isinstance(node, _ENDS)

    def _assign(self, node: ast.Assign) -> None:
        value = self.value(node.value)
        for target in node.targets:
            self.bind(target, value)

    def _annassign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.bind(node.target, self.value(node.value))
        elif isinstance(node.target, ast.Name):
            self.env[node.target.id] = self.annotated(node.target.id, node.annotation)

    def _augassign(self, node: ast.AugAssign) -> None:
        fresh = ast.BinOp(node.target, node.op, node.value)
        ast.copy_location(fresh, node)
        self.bind(node.target, self.value(fresh))

    def _return(self, node: ast.Return) -> bool:
        if node.value is not None:
            self.scope.returns.append(self.value(node.value))
        return True

    def _functiondef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        function = self.code.function_of(node)
        if function is not None:
            function.outer = self.env
            self.env[node.name] = Value(node=node, function=function, name=node.name)

    _asyncfunctiondef = _functiondef

    def _classdef(self, node: ast.ClassDef) -> None:
        return None

    def _if(self, node: ast.If) -> bool:
        test = self.value(node.test)
        if test.const is not None and not test.const and not test.has("default"):
            return self.body(node.orelse)
        if isinstance(test.const, bool):
            return self.body(node.body)
        looked_at = self.mentioned(node.test)
        before, guards = self.env, self.guards
        self.guards = guards | looked_at
        self.env = dict(before)
        self.refine(node.test, holds=True)
        first_ends = self.body(node.body)
        first = self.env
        self.env = dict(before)
        self.refine(node.test, holds=False)
        second_ends = self.body(node.orelse)
        second = self.env
        self.guards = guards | looked_at if first_ends or second_ends else guards
        if first_ends and second_ends:
            self.env = before
            return True
        if first_ends or second_ends:
            self.env = second if first_ends else first
        else:
            self.env = self.merged(before, first, second)
        return False

    def merged(
        self, before: dict[str, Value], first: dict[str, Value], second: dict[str, Value]
    ) -> dict[str, Value]:
        """Returns what names hold after one of two branches was taken."""
        out = dict(second)
        for name, value in first.items():
            other = second.get(name)
            if other is None or other is value:
                out[name] = value
            else:
                out[name] = join(value, other)
        return out

    def _for(self, node: ast.For | ast.AsyncFor) -> None:
        source = self.value(node.iter)
        self.bind(node.target, self.element(source))
        self.loops.append(node)
        before = dict(self.env)
        self.body(node.body)
        self.env = self.merged(before, before, self.env)
        self.loops.pop()
        self.body(node.orelse)

    _asyncfor = _for

    def _while(self, node: ast.While) -> None:
        self.value(node.test)
        self.loops.append(node)
        before = dict(self.env)
        self.body(node.body)
        self.env = self.merged(before, before, self.env)
        self.loops.pop()
        self.body(node.orelse)

    def _with(self, node: ast.With | ast.AsyncWith) -> bool:
        grad, autocast = self.grad, self.autocast
        for item in node.items:
            value = self.value(item.context_expr)
            if item.optional_vars is not None:
                self.bind(item.optional_vars, value)
            self.enter(value)
        ended = self.body(node.body)
        self.grad, self.autocast = grad, autocast
        return ended

    _asyncwith = _with

    def enter(self, context: Value) -> None:
        """Takes note of a region in which numbers are computed otherwise."""
        if context.op in ("no_grad", "inference_mode"):
            self.grad = False
        elif context.op in ("enable_grad", "set_grad_enabled"):
            self.grad = True
        elif context.op == "autocast":
            self.autocast = autocast_type(context)

    def _try(self, node: ast.Try) -> bool:
        before = dict(self.env)
        ended = self.body(node.body)
        after = self.env
        for handler in node.handlers:
            self.env = dict(before)
            if not self.body(handler.body):
                after = self.merged(before, after, self.env)
                ended = False
        self.env = after
        if not ended:
            ended = self.body(node.orelse)
        return self.body(node.finalbody) or ended

    _trystar = _try

    def _assert(self, node: ast.Assert) -> None:
        self.value(node.test)
        self.guards = self.guards | self.mentioned(node.test)
        self.refine(node.test, holds=True)

    def _match(self, node: ast.Match) -> None:
        self.value(node.subject)
        before = dict(self.env)
        after = before
        for case in node.cases:
            self.env = dict(before)
            if not self.body(case.body):
                after = self.merged(before, after, self.env)
        self.env = after

    def _delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            if isinstance(target, ast.Name):
                self.env.pop(target.id, None)


def join(a: Value, b: Value) -> Value:
    """Returns what is known about a value that is one of two."""
    return Value(
        min(a.lo, b.lo),
        max(a.hi, b.hi),
        a.kinds | b.kinds,
        const=a.const if a.const == b.const else None,
        op="join",
        inputs=(a, b),
        node=b.node,
        name=b.name,
        half=a.half if a.half == b.half else None,
        cls=a.cls or b.cls,
        function=a.function or b.function,
        path=a.path if a.path == b.path else "",
        scope=b.scope,
        grad=a.grad or b.grad,
    )


def autocast_type(context: Value) -> str:
    """Returns the type an autocast region computes in; empty if there is none."""
    enabled = context.keywords.get("enabled")
    if enabled is not None and enabled.const is False:
        return ""
    dtype = context.keywords.get("dtype") or (
        context.inputs[1] if len(context.inputs) > 1 else None
    )
    device = context.keywords.get("device_type") or (context.inputs[0] if context.inputs else None)
    if dtype is not None:
        last = dtype.path.rpartition(".")[2]
        return {"half": "float16"}.get(last, last) or "unknown"
    if device is not None and device.const in ("cpu", "xla"):
        return "bfloat16"
    return "float16"


def unknown(name: str = "", node: ast.AST | None = None, kinds: frozenset[str] = NO_KINDS) -> Value:
    """Returns a value about which no more than its name is known."""
    return Value(-INF, INF, kinds | kinds_of(name), node=node, name=name)


__all__ = ["Flow", "Function", "autocast_type", "join", "unknown"]
