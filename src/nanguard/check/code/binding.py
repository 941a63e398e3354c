"""The base of the reader of functions: where it is, what it knows there, which names hold what."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from nanguard.check.code.operations import known
from nanguard.check.code.values import INF, NO_KINDS, SHAPE, SMALL, Value, kinds_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.scopes import Class, Function


def half_of(op: str, inputs: tuple[Value, ...], keywords: dict[str, Value]) -> bool | None:
    """Returns whether an operation's result is float16, as far as it can be told."""
    if op == "half":
        return True
    if op in ("float", "double", "bfloat16"):
        return False
    dtype = keywords.get("dtype")
    candidates = [dtype] if dtype is not None else list(inputs[1:]) if op in ("to", "type") else []
    for value in candidates:
        last = value.path.rpartition(".")[2] if value.path.startswith("torch.") else ""
        if last in ("float16", "half", "HalfTensor"):
            return True
        if last in ("float32", "float", "float64", "double", "bfloat16"):
            return False
    states = [value.half for value in inputs if value.half is not None]
    if not states or (op in ("compare", "new", "call", "matmul") and not any(states)):
        return None
    return all(states)


# Expressions deeper than this are not followed.
_MAX_DEPTH = 120


class FunctionReader:
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
                final = _in_the_end(assigned)
                return final[0] if len(final) == 1 else self.either(final)
        method = cls.method(name)
        if method is not None:
            return Value(function=method, name=name)
        return None

    def either(self, values: list[Value]) -> Value:
        """Returns what is known about a value that is one of several."""
        first, *others = values[:4]
        sizes = {len(v.items) if v.items is not None else -1 for v in values[:4]}
        items = None
        if len(sizes) == 1 and 0 < next(iter(sizes)) <= 12:
            rows = zip(*(v.items or () for v in values[:4]), strict=True)
            items = tuple(self.either(list(row)) for row in rows) if others else first.items
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
            items=items,
            cls=next((v.cls for v in values if v.cls), None),
        )


def _in_the_end(assigned: list[Value]) -> list[Value]:
    """Returns what an attribute may hold without the lists that were always appended to."""
    grown = {
        id(value.inputs[0].core)
        for value in assigned
        if value.op == "appended" and value.guards <= value.inputs[0].core.guards
    }
    return [value for value in assigned if id(value.core) not in grown] or assigned


# What is an imported thing or a region still, under whatever name.
_THINGS = frozenset(
    {"", "autocast", "no_grad", "inference_mode", "enable_grad", "set_grad_enabled", "finfo"}
)


# What counts; a condition on a count looks at what was counted.
_COUNTS = frozenset({"sum", "count_nonzero", "any", "all", "numel", "len", "mean"})
# Modules that are lists of modules.
_LISTS = ("torch.nn.ModuleList", "torch.nn.Sequential", "torch.nn.ParameterList")


class Binding(FunctionReader):
    """Binds names, and takes over what conditions say about them."""

    def bind(self, target: ast.expr, value: Value) -> None:
        """Gives a name, an attribute or an element a value."""
        if isinstance(target, ast.Name):
            self.env[target.id] = self.renamed(value, target.id)
        elif isinstance(target, (ast.Tuple, ast.List)):
            self._unpack(target, value)
        elif isinstance(target, ast.Starred):
            self.bind(target.value, value)
        elif isinstance(target, ast.Attribute):
            self._bind_attribute(target, value)
        elif isinstance(target, ast.Subscript):
            base = self.value(target.value)
            index = self.value(target.slice)
            made = self.make("setitem", target, (base, index, value), event=True)
            made.kinds = base.kinds | (value.kinds & {"sigmoid"})
            number = value.number()
            made.lo = min(base.lo, number) if number is not None else -INF
            made.hi = max(base.hi, number) if number is not None else INF
            if number is not None:
                made.lo = max(made.lo, self._floor(target, base, number))
            self.rebind(target.value, made)

    def _floor(self, target: ast.Subscript, base: Value, number: float) -> float:
        """Returns the lower bound that ``x[x < 0.1] = 0.1`` or ``x[x == 0] = 1`` gives."""
        test = target.slice
        if not isinstance(test, ast.Compare) or len(test.ops) != 1:
            return -INF
        limit = self.code.values[test.comparators[0]].number()
        if limit is None or ast.dump(test.left) != ast.dump(target.value):
            return -INF
        if isinstance(test.ops[0], (ast.Lt, ast.LtE)):
            above = limit if isinstance(test.ops[0], ast.Lt) else limit + SMALL
            return min(number, above)
        if isinstance(test.ops[0], ast.Eq) and limit == base.lo == 0 and number > 0:
            return min(number, SMALL)
        return -INF

    def _unpack(self, target: ast.Tuple | ast.List, value: Value) -> None:
        items = value.items
        starred = any(isinstance(item, ast.Starred) for item in target.elts)
        for place, element in enumerate(target.elts):
            if items is not None and not starred and place < len(items):
                self.bind(element, items[place])
            elif value.op in SHAPE or value.has("size") or value.op == "each":
                self.bind(element, self.part(value, element))
            else:
                kinds = value.kinds & {"network", "size"}
                part = self.make("part", element, (value,))
                part.kinds = kinds
                part.half = value.half
                self.bind(element, part)

    def part(self, value: Value, node: ast.AST) -> Value:
        """Returns one of several tensors that an operation split a value into."""
        return self.make("getitem", node, (value,))

    def _bind_attribute(self, target: ast.Attribute, value: Value) -> None:
        base = self.value(target.value)
        named = self.renamed(value, target.attr)
        if isinstance(target.value, ast.Name) and target.value.id == "self" and self.scope.cls:
            self.scope.cls.attributes.setdefault(target.attr, []).append(named)
            self.env[f"self.{target.attr}"] = named
        made = self.make("setattr", target, (base, value), event=True)
        made.name = target.attr

    def rebind(self, target: ast.expr, value: Value) -> None:
        """Gives a name the result of an operation that worked in place."""
        if isinstance(target, ast.Attribute) and getattr(target.value, "id", "") == "self":
            if value.op == "appended" and self.scope.cls is not None:
                self.scope.cls.attributes.setdefault(target.attr, []).append(value)
                self.env[f"self.{target.attr}"] = self.renamed(value, target.attr)
            return
        while isinstance(target, (ast.Subscript, ast.Call, ast.Attribute)):
            if isinstance(target, ast.Attribute) and target.attr != "data":
                return
            target = target.func if isinstance(target, ast.Call) else target.value
        if isinstance(target, ast.Name) and target.id in self.env:
            self.env[target.id] = self.renamed(value, target.id)

    def renamed(self, value: Value, name: str) -> Value:
        """Returns a value under a name, with what the name says about it."""
        hints = kinds_of(name)
        is_thing = value.op in _THINGS and bool(value.path)
        if value.op == "new" or is_thing or value.function is not None:
            value.name = value.name or name
            return value
        return Value(
            value.lo,
            value.hi,
            value.kinds | hints,
            value.const,
            "named",
            (value,),
            {},
            value.node,
            name,
            value.half,
            value.path if value.op in ("join", "named") else "",
            value.items,
            value.cls,
            value.function,
            value.scope,
            value.grad,
            value.guards,
            value.autocast,
        )

    def element(self, source: Value, depth: int = 3) -> Value:
        """Returns what a loop over a value gives."""
        if source.op == "each" and source.inputs:
            return source.inputs[0]
        if source.op == "appended":
            last, before = source.inputs[1], source.inputs[0]
            known = before.core.op in ("appended", "each") or bool(before.items)
            return self.either([last, self.element(before)]) if known else last
        if source.op in ("named", "join") and source.inputs and depth:
            added = [v for v in source.inputs if v.core.op in ("appended", "join")]
            if added:
                return self.either([self.element(v, depth - 1) for v in added[:3]])
        if source.op == "new" and source.path in _LISTS and source.inputs:
            return self.element(source.inputs[0])
        if source.op == "call" and source.name in ("zip", "enumerate") and len(source.inputs) > 1:
            return self._together(source)
        if source.items:
            return self.either(list(source.items)) if len(source.items) > 1 else source.items[0]
        if source.op == "call" and source.name == "range":
            return Value(0.0, INF, kinds=frozenset({"size"}), op="element", inputs=(source,))
        made = Value(op="element", inputs=(source,), node=source.node, half=source.half)
        if source.name in ("enumerate", "zip") and source.op == "call":
            made.op = source.name
        return made

    def _together(self, source: Value) -> Value:
        """Returns what a loop over ``zip`` or ``enumerate`` gives."""
        parts = [self.element(given) for given in source.inputs[1:]]
        if source.name == "enumerate":
            parts = [Value(0.0, INF, frozenset({"size"}), op="element"), parts[0]]
        return Value(op="element", inputs=(source,), node=source.node, items=tuple(parts))

    def annotated(self, name: str, annotation: ast.expr | None) -> Value:
        """Returns a parameter, with what its name and its annotation say."""
        value = Value(kinds=kinds_of(name), node=annotation, name=name)
        text = annotation
        if isinstance(text, ast.Constant) and isinstance(text.value, str):
            cls = self.code.classes.get(text.value.rpartition(".")[2])
        else:
            cls = self.code.classes.get(text.id) if isinstance(text, ast.Name) else None
        if cls is not None:
            value.cls = cls
        if annotation is not None and _mentions_tensor(annotation):
            value.kinds |= {"tensor"}
        return value

    def mentioned(self, test: ast.expr) -> frozenset[str]:
        """Returns the names and expressions a condition looks at."""
        found = set()
        for node in _looked_at(test):
            if isinstance(node, ast.Name):
                found.add(node.id)
                held = self.env.get(node.id)
                if held is not None and held.core.op in _COUNTS:
                    found |= {part.name for part in held.upstream(6) if part.name}
            elif isinstance(node, (ast.Attribute, ast.Call, ast.Subscript)):
                found.add(_written(node))
        return frozenset(found)

    def refine(self, test: ast.expr, *, holds: bool) -> None:
        """Takes over what a condition says about the names in it."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            self.refine(test.operand, holds=not holds)
        elif isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) and holds:
            for part in test.values:
                self.refine(part, holds=True)
        elif isinstance(test, ast.Compare) and len(test.ops) == 1:
            self._refine_compare(test, holds=holds)

    def _refine_compare(self, test: ast.Compare, *, holds: bool) -> None:
        left, op, right = test.left, test.ops[0], test.comparators[0]
        bound = self.code.values.get(right)
        if not isinstance(left, ast.Name) or bound is None or bound.number() is None:
            return
        value = self.env.get(left.id)
        if value is None:
            return
        number = bound.number() or 0.0
        above = isinstance(op, (ast.Gt, ast.GtE)) if holds else isinstance(op, (ast.Lt, ast.LtE))
        strict = isinstance(op, ast.Gt) if holds else isinstance(op, ast.LtE)
        if above:
            refined = self.renamed(value, left.id)
            refined.lo = max(value.lo, number + (SMALL if strict else 0.0))
            self.env[left.id] = refined


# What a tensor is, and not what its numbers are; and how many of them there are.
_METADATA = frozenset(
    {"dim", "ndimension", "get_device", "is_contiguous", "is_floating_point", "is_complex", "type"}
)
_METADATA_FIELDS = frozenset(
    {"ndim", "device", "dtype", "is_cuda", "requires_grad", "is_sparse", "layout", "names"}
)
_LENGTHS = frozenset({"size", "shape", "len", "numel"})
_SAME = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)


def _looked_at(test: ast.AST, *, alike: bool = False) -> Iterator[ast.AST]:
    """Yields the parts of a condition that are about numbers.

    Whether there is a value at all is no such question, nor of which type it is or on which device,
    nor whether two have the same shape. Whether there is anything in it is one.

    Args:
        test: The condition.
        alike: Whether it asks only if two things are the same.
    """
    if isinstance(test, ast.Compare):
        if all(_is_none(right) for right in test.comparators):
            return
        parts = (test.left, *test.comparators)
        alike = all(isinstance(op, _SAME) for op in test.ops) and not any(map(_is_few, parts))
    elif isinstance(test, ast.Call) and getattr(test.func, "id", "") in ("isinstance", "hasattr"):
        return
    asked = _asked_of(test)
    if asked in _METADATA or asked in _METADATA_FIELDS or (alike and asked in _LENGTHS):
        return
    yield test
    for child in ast.iter_child_nodes(test):
        yield from _looked_at(child, alike=alike)


def _asked_of(node: ast.AST) -> str:
    """Returns what an expression asks a tensor for; nothing if it is another kind of expression."""
    while isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Attribute):
        return node.attr if node.attr == "shape" or node.attr in _METADATA_FIELDS else ""
    if not isinstance(node, ast.Call):
        return ""
    if isinstance(node.func, ast.Name):
        return "len" if node.func.id == "len" else ""
    last = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    return last if last in _METADATA or last in _LENGTHS else ""


def _is_few(node: ast.expr) -> bool:
    """Returns whether it is 0 or 1: how many there have to be at least."""
    return isinstance(node, ast.Constant) and node.value in (0, 1)


def _written(node: ast.expr) -> str:
    """Returns an expression as it would be written; dotted names, which are many, quickly."""
    parts: list[str] = []
    inner = node
    while isinstance(inner, ast.Attribute):
        parts.append(inner.attr)
        inner = inner.value
    if not isinstance(inner, ast.Name):
        return ast.unparse(node)
    return ".".join((inner.id, *reversed(parts)))


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _mentions_tensor(annotation: ast.expr) -> bool:
    if isinstance(annotation, ast.Constant):
        return isinstance(annotation.value, str) and "Tensor" in annotation.value
    return any(
        getattr(node, "id", "") == "Tensor" or getattr(node, "attr", "") == "Tensor"
        for node in ast.walk(annotation)
    )
