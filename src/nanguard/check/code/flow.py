"""Following values through the expressions and statements of a function, branch by branch."""

from __future__ import annotations

import ast
import math
from typing import TYPE_CHECKING, Any

from nanguard.check.code.calls import Calls
from nanguard.check.code.scopes import Function
from nanguard.check.code.values import INF, NO_KINDS, SMALL, Value, kinds_of

if TYPE_CHECKING:
    from collections.abc import Sequence

_BINARY = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.Pow: "pow",
    ast.MatMult: "matmul",
    ast.FloorDiv: "floordiv",
    ast.Mod: "mod",
    ast.BitAnd: "and",
    ast.BitOr: "or",
    ast.BitXor: "xor",
}
_UNARY = {ast.USub: "neg", ast.Not: "not", ast.Invert: "invert"}
_CONSTANTS = {
    "math.inf": INF,
    "numpy.inf": INF,
    "torch.inf": INF,
    "math.nan": math.nan,
    "torch.nan": math.nan,
    "numpy.nan": math.nan,
    "math.pi": math.pi,
    "torch.pi": math.pi,
    "numpy.pi": math.pi,
    "math.e": math.e,
    "numpy.Inf": INF,
    "numpy.NINF": -INF,
}
# The lowest number, the smallest positive one and the resolution of each type.
_FINFO = {
    "float16": (-65504.0, 6.103515625e-05, 0.0009765625),
    "half": (-65504.0, 6.103515625e-05, 0.0009765625),
    "bfloat16": (-3.3895e38, 1.1755e-38, 0.0078125),
    "float32": (-3.4028e38, 1.1755e-38, 1.1920929e-07),
    "float": (-3.4028e38, 1.1755e-38, 1.1920929e-07),
    "float64": (-1.7977e308, 2.2251e-308, 2.22e-16),
    "double": (-1.7977e308, 2.2251e-308, 2.22e-16),
}


# What people call the settings of a run.
_SETTINGS = frozenset(
    {"args", "opt", "opts", "cfg", "config", "conf", "hparams", "hps", "params", "FLAGS", "options"}
)


class Expressions(Calls):
    """Reads expressions."""

    def _constant(self, node: ast.Constant) -> Value:
        const = node.value
        if isinstance(const, (int, float)):
            number = float(const) if abs(const) < 1e300 else INF
            return Value(number, number, const=const, node=node)
        return Value(const=const, node=node, name="None" if const is None else "")

    def _name(self, node: ast.Name) -> Value:
        value = self.lookup(node.id)
        if value is not None:
            return value
        path = self.code.names.path(node)
        if path:
            number = _CONSTANTS.get(path)
            if number is not None:
                return Value(number, number, const=number, node=node, path=path, name=node.id)
            found = self.code.found(node) if self.code.project is not None else None
            if isinstance(found, Value):
                return self.renamed(found, node.id)
            if isinstance(found, Function):
                return Value(node=node, function=found, name=node.id, path=path)
            return Value(kinds=kinds_of(node.id), node=node, path=path, name=node.id)
        return Value(kinds=kinds_of(node.id), node=node, name=node.id)

    def _attribute(self, node: ast.Attribute) -> Value:
        path = self.code.names.path(node)
        if path:
            return self._imported_attribute(node, path)
        held = self.env.get(f"self.{node.attr}") if _is_self(node.value) else None
        if held is not None:
            return held
        base = self.value(node.value)
        if base.op == "finfo":
            return self._finfo(node, base)
        cls = self.class_of(base)
        if cls is not None:
            found = self.attribute_of(cls, node.attr)
            if found is not None:
                return found
        if node.attr in ("shape", "grad", "T", "mT", "data", "values", "indices"):
            made = self.make(node.attr, node, (base,))
            made.name = node.attr
            if node.attr == "grad":
                made.kinds |= {"gradient"}
            return made
        return self._setting(node, base)

    def _setting(self, node: ast.Attribute, base: Value) -> Value:
        """Reads an attribute of which no more is known than what settings of the project say."""
        made = Value(
            kinds=kinds_of(node.attr), node=node, name=node.attr, op="attribute", inputs=(base,)
        )
        if self.code.project is not None and base.name in _SETTINGS:
            number = self.code.project.setting(node.attr)
            if number is not None:
                made.const, made.lo, made.hi = number, number, number
                made.kinds |= {"default"}
        return made

    def _imported_attribute(self, node: ast.Attribute, path: str) -> Value:
        number = _CONSTANTS.get(path)
        if number is not None:
            return Value(number, number, const=number, node=node, path=path)
        found = self.code.found(node) if self.code.project is not None else None
        if isinstance(found, Value):
            return self.renamed(found, node.attr)
        if isinstance(found, Function):
            return Value(node=node, function=found, name=node.attr, path=path)
        return Value(node=node, path=path, name=node.attr)

    def _finfo(self, node: ast.Attribute, base: Value) -> Value:
        dtype = base.inputs[0].path.rpartition(".")[2] if base.inputs else ""
        lowest, tiny, eps = _FINFO.get(dtype, (-3.4e38, SMALL, SMALL))
        number = {"min": lowest, "max": -lowest, "tiny": tiny, "eps": eps}.get(node.attr)
        exact = dtype in _FINFO
        return Value(
            number if number is not None else -INF,
            number if number is not None else INF,
            frozenset({"eps"} if node.attr in ("eps", "tiny") else {"finfo"}),
            const=number if exact else None,
            node=node,
            op="finfo",
            inputs=(base,),
            name=node.attr,
        )

    def _subscript(self, node: ast.Subscript) -> Value:
        base = self.value(node.value)
        index = self.value(node.slice)
        if base.items is not None and isinstance(index.const, int):
            try:
                return base.items[index.const]
            except IndexError:
                return Value(node=node)
        made = self.make("getitem", node, (base, index))
        made.name = base.name
        if base.path:
            made.kinds |= NO_KINDS
        if isinstance(index.const, str):
            made.name = index.const
            made.kinds = kinds_of(index.const)
            made.op, made.inputs = "field", (base, index)
        if base.op == "shape" or base.has("size"):
            made.kinds |= {"size"}
            made.lo = 0.0
        return made

    def _slice(self, node: ast.Slice) -> Value:
        parts = [part for part in (node.lower, node.upper, node.step) if part is not None]
        return Value(node=node, inputs=tuple(self.value(part) for part in parts))

    def _tuple(self, node: ast.Tuple | ast.List) -> Value:
        items = tuple(self.value(item) for item in node.elts)
        kinds = frozenset().union(*(item.kinds for item in items)) if items else NO_KINDS
        return Value(
            min((i.lo for i in items), default=-INF),
            max((i.hi for i in items), default=INF),
            kinds,
            items=items,
            node=node,
        )

    _list = _tuple

    def _starred(self, node: ast.Starred) -> Value:
        return self.value(node.value)

    def _namedexpr(self, node: ast.NamedExpr) -> Value:
        value = self.value(node.value)
        self.bind(node.target, value)
        return value

    def _await(self, node: ast.Await) -> Value:
        return self.value(node.value)

    def _ifexp(self, node: ast.IfExp) -> Value:
        self.value(node.test)
        guards = self.guards
        asked = self.mentioned(node.test)
        self.guards = guards | asked
        first, second = self.value(node.body), self.value(node.orelse)
        self.guards = guards
        joined = join(first, second)
        joined.node = node
        if first.name in asked or second.name in asked:
            joined.kinds |= {"chosen"}  # `n if n > 0 else 1`
        return joined

    def _boolop(self, node: ast.BoolOp) -> Value:
        guards = self.guards
        inputs = []
        for part in node.values:
            inputs.append(self.value(part))
            self.guards = self.guards | self.mentioned(part)
        self.guards = guards
        op = "and" if isinstance(node.op, ast.And) else "or"
        return self.make(op, node, tuple(inputs))

    def _binop(self, node: ast.BinOp) -> Value:
        left, right = self.value(node.left), self.value(node.right)
        made = self.make(_BINARY.get(type(node.op), "other"), node, (left, right))
        a, b = left.number(), right.number()
        if a is not None and b is not None:
            made.const = _fold(type(node.op), a, b)
            if made.const is not None:
                made.lo = made.hi = float(made.const)
        return made

    def _unaryop(self, node: ast.UnaryOp) -> Value:
        inner = self.value(node.operand)
        if isinstance(node.op, ast.UAdd):
            return inner
        made = self.make(_UNARY[type(node.op)], node, (inner,))
        number = inner.number()
        if isinstance(node.op, ast.Not) and isinstance(inner.const, bool):
            made.const = not inner.const
        elif number is not None and isinstance(node.op, ast.USub):
            made.const = -inner.const
        elif isinstance(node.op, ast.USub):
            made.name = inner.name
        return made

    def _compare(self, node: ast.Compare) -> Value:
        inputs = (self.value(node.left), *(self.value(other) for other in node.comparators))
        made = self.make("compare", node, inputs)
        made.name = type(node.ops[0]).__name__
        return made

    def _lambda(self, node: ast.Lambda) -> Value:
        function = self.code.function_of(node)
        if function is None:
            return Value(node=node)
        function.outer = dict(self.env)
        if not isinstance(self.code.parents.get(node), ast.Assign):
            self.read_lambda(function, ())
        return Value(node=node, function=function, name="lambda")

    def _comprehension(self, node: ast.comprehension) -> None:
        self.bind(node.target, self.element(self.value(node.iter)))
        for test in node.ifs:
            self.value(test)
            self.guards = self.guards | self.mentioned(test)

    def _listcomp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> Value:
        saved, guards = dict(self.env), self.guards
        for generator in node.generators:
            self._comprehension(generator)
        self.loops.append(node)
        element = self.value(node.elt)
        self.loops.pop()
        self.env.clear()
        self.env.update(saved)
        self.guards = guards
        return Value(
            element.lo,
            element.hi,
            element.kinds,
            None,
            "each",
            (element,),
            node=node,
            half=element.half,
            scope=self.scope,
            grad=self.grad,
        )

    _setcomp = _listcomp

    _generatorexp = _listcomp

    def _dictcomp(self, node: ast.DictComp) -> Value:
        saved = dict(self.env)
        for generator in node.generators:
            self._comprehension(generator)
        self.value(node.key)
        element = self.value(node.value)
        self.env.clear()
        self.env.update(saved)
        return Value(kinds=element.kinds, node=node, op="each", inputs=(element,))

    def _dict(self, node: ast.Dict) -> Value:
        for key in node.keys:
            if key is not None:
                self.value(key)
        return Value(node=node, items=None, inputs=tuple(self.value(v) for v in node.values))

    def _joinedstr(self, node: ast.JoinedStr) -> Value:
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                self.value(part.value)
        return Value(node=node)


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _fold(op: type[ast.operator], a: float, b: float) -> Any:
    try:
        if op is ast.Add:
            return a + b
        if op is ast.Sub:
            return a - b
        if op is ast.Mult:
            return a * b
        if op is ast.Div:
            return a / b
        if op is ast.Pow and abs(b) < 64 and abs(a) < 1e6:
            result = a**b
            return result if isinstance(result, (int, float)) else None
    except (ZeroDivisionError, OverflowError, ValueError):
        return None
    return None


_MOST_ITEMS = 12  # of two tuples that are one of two, item by item
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
        self.code.parents[fresh] = node  # it stands where the statement does
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
        self.guards = guards | looked_at  # not what the other branch has asked
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
        before, guards = dict(self.env), self.guards
        self.body(node.body)
        self.env = self.merged(before, before, self.env)
        self.guards = guards
        self.loops.pop()
        self.body(node.orelse)

    _asyncfor = _for

    def _while(self, node: ast.While) -> None:
        self.value(node.test)
        self.loops.append(node)
        before, guards = dict(self.env), self.guards
        self.body(node.body)
        self.env = self.merged(before, before, self.env)
        self.guards = guards
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
    items = None
    if a.items is not None and b.items is not None and len(a.items) == len(b.items) <= _MOST_ITEMS:
        items = tuple(map(join, a.items, b.items))
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
        items=items,
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
