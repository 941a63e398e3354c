"""Reading expressions: what each makes, and of what."""

from __future__ import annotations

import ast
import math
from typing import TYPE_CHECKING, Any

from nanguard.sources.python.bounds import known
from nanguard.sources.python.layers import LAYERS
from nanguard.sources.python.values import INF, NO_KINDS, SHAPE, SMALL, Value, kinds_of

if TYPE_CHECKING:
    from nanguard.sources.python.code import Code
    from nanguard.sources.python.scopes import Class, Function

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
# Operations by other names.
_ALIASES = {
    "multiply": "mul",
    "divide": "div",
    "true_divide": "div",
    "subtract": "sub",
    "negative": "neg",
    "absolute": "abs",
    "fabs": "abs",
    "arccos": "acos",
    "arcsin": "asin",
    "concatenate": "cat",
    "concat": "cat",
    "bmm": "matmul",
    "mm": "matmul",
    "baddbmm": "matmul",
    "clip": "clamp",
    "__getitem__": "getitem",
    "norm_except_dim": "norm",
    "sub_": "sub",
    "std_mean": "std",
    "var_mean": "var",
    "rearrange": "rearrange",
    "index_put": "setitem",
    "nan_to_num": "nan_to_num",
    "logical_and": "and",
    "logical_or": "or",
    "logical_not": "not",
    "bitwise_not": "invert",
    "float_power": "pow",
    "sigmoid_": "sigmoid",
    "isneginf": "isneginf",
    "isposinf": "isposinf",
}
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
_FINFO = {
    "float16": (-65504.0, 6.103515625e-05, 0.0009765625),
    "half": (-65504.0, 6.103515625e-05, 0.0009765625),
    "bfloat16": (-3.3895e38, 1.1755e-38, 0.0078125),
    "float32": (-3.4028e38, 1.1755e-38, 1.1920929e-07),
    "float": (-3.4028e38, 1.1755e-38, 1.1920929e-07),
    "float64": (-1.7977e308, 2.2251e-308, 2.22e-16),
    "double": (-1.7977e308, 2.2251e-308, 2.22e-16),
}
_TORCH = ("torch.", "math.", "numpy.", "einops.", "torchvision.")
_MAX_DEPTH = 120


class Expressions:
    """Reads expressions in one function.

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

    # Values --------------------------------------------------------------------------------

    def value(self, node: ast.expr) -> Value:
        """Returns what is known about an expression, and remembers it."""
        self.depth += 1
        try:
            if self.depth > _MAX_DEPTH:
                return Value(node=node)
            reader = getattr(self, "_" + type(node).__name__.lower(), None)
            value = reader(node) if reader is not None else self._parts(node)
        finally:
            self.depth -= 1
        self.code.values[node] = value
        return value

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

    def _parts(self, node: ast.expr) -> Value:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child)
            elif isinstance(child, ast.comprehension):
                self._comprehension(child)
        return Value(node=node)

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
            return Value(kinds=kinds_of(node.id), node=node, path=path, name=node.id)
        return Value(kinds=kinds_of(node.id), node=node, name=node.id)

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

    def _attribute(self, node: ast.Attribute) -> Value:
        path = self.code.names.path(node)
        if path:
            number = _CONSTANTS.get(path)
            if number is not None:
                return Value(number, number, const=number, node=node, path=path)
            return Value(node=node, path=path, name=node.attr)
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
        return Value(
            kinds=kinds_of(node.attr), node=node, name=node.attr, op="attribute", inputs=(base,)
        )

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

    def class_of(self, value: Value) -> Class | None:
        """Returns the class of the file that a value is an instance of."""
        if value.cls is not None:
            return value.cls
        core = value.core
        return core.cls

    def attribute_of(self, cls: Class, name: str) -> Value | None:
        """Returns what ``self.NAME`` holds, from what the class assigns to it."""
        for ancestor in cls.line_of_descent():
            assigned = ancestor.attributes.get(name)
            if assigned:
                return assigned[0] if len(assigned) == 1 else self._either(assigned)
        method = cls.method(name)
        if method is not None:
            return Value(function=method, name=name)
        return None

    def _either(self, values: list[Value]) -> Value:
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
        for part in (node.lower, node.upper, node.step):
            if part is not None:
                self.value(part)
        return Value(node=node)

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
        from nanguard.sources.python.flow import join

        self.value(node.test)
        guards = self.guards
        self.guards = guards | self.mentioned(node.test)
        first, second = self.value(node.body), self.value(node.orelse)
        self.guards = guards
        joined = join(first, second)
        joined.node = node
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
        if number is not None and isinstance(node.op, ast.USub):
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

    def read_lambda(self, function: Function, given: tuple[Value, ...]) -> Value:
        """Reads the body of a lambda, with what it is called with as far as that is known."""
        node = function.node
        if not isinstance(node, ast.Lambda) or function.state == "reading":
            return Value(node=node)
        function.state = "reading"
        saved = dict(self.env)
        arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        for place, argument in enumerate(arguments):
            unknown = Value(kinds=kinds_of(argument.arg), node=argument, name=argument.arg)
            self.env[argument.arg] = given[place] if place < len(given) else unknown
        result = self.value(node.body)
        self.env.clear()
        self.env.update(saved)
        function.returns = [result]
        function.state = "read"
        return result

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
        made = Value(
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
        return made

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

    # Calls ---------------------------------------------------------------------------------

    def _call(self, node: ast.Call) -> Value:
        path = self.code.names.path(node.func)
        if not path and isinstance(node.func, ast.Attribute):
            return self._method(node, node.func)
        callee = self.value(node.func)
        if callee.op != "new":
            path = path or callee.path
        inputs = tuple(self.value(argument) for argument in node.args)
        keywords = {k.arg or "**": self.value(k.value) for k in node.keywords}
        if callee.function is not None:
            return self._local(node, callee.function, inputs, keywords)
        if isinstance(node.func, ast.Name) and node.func.id in self.code.classes and not path:
            return self._instance(node, self.code.classes[node.func.id], inputs, keywords)
        if path:
            return self._imported(node, path, inputs, keywords)
        if callee.op in ("new", "join", "each") or callee.cls is not None:
            return self._called(node, callee, inputs, keywords)
        if isinstance(node.func, ast.Name):
            made = self._builtin(node, node.func.id, inputs, keywords)
            if made is not None:
                return made
        return self._unknown_call(node, callee, inputs, keywords)

    def _builtin(
        self, node: ast.Call, name: str, inputs: tuple[Value, ...], keywords: dict[str, Value]
    ) -> Value | None:
        if name == "float" and inputs and isinstance(inputs[0].const, str):
            try:
                number = float(inputs[0].const)
            except ValueError:
                return Value(node=node)
            return Value(number, number, const=number, node=node)
        if name in ("abs", "max", "min", "sum", "len", "float", "int", "bool", "pow", "round"):
            op = {"float": "item", "int": "item", "round": "item", "sum": "total"}.get(name, name)
            if inputs:
                made = self.make(op, node, inputs, keywords)
                if name == "int":
                    made.const = inputs[0].const
                return made
        return None

    def _imported(
        self, node: ast.Call, path: str, inputs: tuple[Value, ...], keywords: dict[str, Value]
    ) -> Value:
        last = path.rpartition(".")[2]
        if last == "Parameter" and path.startswith("torch.nn"):
            return self.make("parameter", node, inputs, keywords, event=True)
        if last[:1].isupper() and last not in ("Tensor", "FloatTensor"):
            made = self.make("new", node, inputs, keywords, event=True)
            made.path = path
            return made
        if not path.startswith(_TORCH):
            made = self.make("call", node, inputs, keywords, event=True)
            made.path = path
            made.name = last
            return made
        op = _ALIASES.get(last.rstrip("_"), last.rstrip("_"))
        if path.startswith("numpy."):
            return self._numpy(node, op, path, inputs, keywords)
        if path.startswith("math."):
            return self._math(node, last, path, inputs)
        made = self.make(op, node, inputs, keywords, event=True)
        made.path = path
        if last in ("std_mean", "var_mean"):
            made.items = (made, Value(node=node, op="mean", inputs=inputs))
        if last.endswith("_") and node.args:
            self.rebind(node.args[0], made)
        self._literal_tensor(made)
        return made

    def _literal_tensor(self, made: Value) -> None:
        if made.op in ("full", "full_like", "new_full", "tensor", "as_tensor", "new_tensor"):
            position = 0 if made.op in ("tensor", "as_tensor") else 1
            fill = made.arg(position, "fill_value")
            if fill is not None and fill.number() is not None:
                made.lo = made.hi = fill.number() or 0.0

    def _numpy(
        self,
        node: ast.Call,
        op: str,
        path: str,
        inputs: tuple[Value, ...],
        keywords: dict[str, Value],
    ) -> Value:
        lo, hi, kinds = known(op, inputs, keywords) if inputs else (-INF, INF, NO_KINDS)
        made = self.make("numpy." + op, node, inputs, keywords, event=True)
        made.lo, made.hi, made.kinds, made.path = lo, hi, kinds, path
        return made

    def _math(self, node: ast.Call, last: str, path: str, inputs: tuple[Value, ...]) -> Value:
        lo, hi, kinds = known(last, inputs, {}) if inputs else (-INF, INF, NO_KINDS)
        made = self.make("math." + last, node, inputs)
        made.lo, made.hi, made.kinds, made.path = lo, hi, kinds, path
        numbers = [value.number() for value in inputs]
        if numbers and None not in numbers:
            try:
                made.const = float(getattr(math, last)(*numbers))
                made.lo = made.hi = made.const
            except (ValueError, OverflowError, TypeError, AttributeError):
                made.const = None
        return made

    def _method(self, node: ast.Call, func: ast.Attribute) -> Value:
        receiver = self.value(func.value)
        inputs = tuple(self.value(argument) for argument in node.args)
        keywords = {k.arg or "**": self.value(k.value) for k in node.keywords}
        cls = self.class_of(receiver)
        if cls is not None:
            method = cls.method(func.attr)
            if method is not None:
                return self._local(node, method, inputs, keywords, receiver)
            held = self.attribute_of(cls, func.attr)
            if held is not None:
                self.code.values[func] = held
                return self._called(node, held, inputs, keywords)
            if cls.is_module() and func.attr not in ("half", "float", "to", "cuda", "train"):
                if func.attr[:1] != "_" and not hasattr_tensor(func.attr):
                    return self._unknown_call(node, receiver, inputs, keywords, func.attr)
        if receiver.function is not None:
            return self._unknown_call(node, receiver, inputs, keywords, func.attr)
        op = _ALIASES.get(func.attr.rstrip("_"), func.attr.rstrip("_"))
        made = self.make(op, node, (receiver, *inputs), keywords, event=True)
        made.name = func.attr
        if func.attr.endswith("_") and not func.attr.startswith("_"):
            self.rebind(func.value, made)
        if op in ("half", "float", "to", "cuda", "train", "eval", "requires_grad"):
            made.cls, made.path = receiver.cls, receiver.path
        self._literal_tensor(made)
        return made

    def _instance(
        self, node: ast.Call, cls: Class, inputs: tuple[Value, ...], keywords: dict[str, Value]
    ) -> Value:
        made = self.make("new", node, inputs, keywords, event=True)
        made.cls, made.name = cls, cls.name
        return made

    def _called(
        self, node: ast.Call, callee: Value, inputs: tuple[Value, ...], keywords: dict[str, Value]
    ) -> Value:
        """Calling an object: a layer of torch, a module of the file, something else."""
        if callee.op == "join":
            for option in callee.inputs:
                if option.op == "new" or option.cls is not None or option.function is not None:
                    return self._called(node, option, inputs, keywords)
        if callee.function is not None:
            return self._local(node, callee.function, inputs, keywords)
        cls = self.class_of(callee)
        if cls is not None:
            method = cls.method("forward") or cls.method("__call__")
            if method is not None:
                return self._local(node, method, inputs, keywords, callee)
            return self._unknown_call(node, callee, inputs, keywords)
        layer = callee.core
        last = layer.path.rpartition(".")[2] if layer.op == "new" else ""
        if last == "Sequential" and layer.inputs:
            final = layer.inputs[-1]
            if final.path.rpartition(".")[2] in LAYERS:
                return self._called(node, final, inputs, keywords)
        if layer.path.startswith("torch.nn.") and last in LAYERS:
            made = self.make(LAYERS[last], node, inputs, {**layer.keywords, **keywords}, event=True)
            made.path = layer.path
            return made
        return self._unknown_call(node, callee, inputs, keywords)

    def _unknown_call(
        self,
        node: ast.Call,
        callee: Value,
        inputs: tuple[Value, ...],
        keywords: dict[str, Value],
        method: str = "",
    ) -> Value:
        made = self.make("call", node, (callee, *inputs), keywords, event=True)
        made.name = method or callee.name
        core = callee.core
        is_network = callee.has("network") or (
            core.op == "new" and (core.path.startswith("torch.nn.") or core.cls is not None)
        )
        if is_network:
            made.kinds |= {"network"}
        if callee.has("loss") or made.name.endswith(("criterion", "loss_fn", "crit")):
            made.kinds |= {"loss"}
        return made

    def _local(
        self,
        node: ast.Call,
        function: Function,
        inputs: tuple[Value, ...],
        keywords: dict[str, Value],
        receiver: Value | None = None,
    ) -> Value:
        """Calling a function of the file: it makes what it returns."""
        if isinstance(function.node, ast.Lambda):
            result = self.read_lambda(function, inputs)
        else:
            result = self.code.result_of(function)
        made = Value(
            result.lo,
            result.hi,
            result.kinds,
            result.const,
            "local",
            inputs,
            keywords,
            node,
            function.name,
            result.half,
            cls=result.cls,
            items=result.items,
            scope=self.scope,
            grad=self.grad,
            guards=self.guards,
            autocast=self.autocast,
        )
        made.function = None
        self.scope.events.append(made)
        self.code.calls.append((made, function))
        if function.returns:
            made.op = "named"
            made.inputs = (result,)
            made.keywords = {}
        if receiver is not None and self.class_of(receiver) is not None:
            cls = self.class_of(receiver)
            if cls is not None and cls.is_module() and function.name == "forward":
                made.kinds |= {"network"}
        return made

    # Binding -------------------------------------------------------------------------------

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
            made.kinds = base.kinds
            number = value.number()
            made.lo = min(base.lo, number) if number is not None else -INF
            made.hi = max(base.hi, number) if number is not None else INF
            self.rebind(target.value, made)

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
        made = self.make("getitem", node, (value,))
        return made

    def _bind_attribute(self, target: ast.Attribute, value: Value) -> None:
        base = self.value(target.value)
        named = self.renamed(value, target.attr)
        if isinstance(target.value, ast.Name) and target.value.id == "self" and self.scope.cls:
            self.scope.cls.attributes.setdefault(target.attr, []).append(named)
        made = self.make("setattr", target, (base, value), event=True)
        made.name = target.attr

    def rebind(self, target: ast.expr, value: Value) -> None:
        """Gives a name the result of an operation that worked in place."""
        while isinstance(target, (ast.Subscript, ast.Call)):
            target = target.value if isinstance(target, ast.Subscript) else target.func
        if isinstance(target, ast.Name) and target.id in self.env:
            self.env[target.id] = self.renamed(value, target.id)

    def renamed(self, value: Value, name: str) -> Value:
        """Returns a value under a name, with what the name says about it."""
        hints = kinds_of(name)
        if value.op == "new" or value.path or value.function is not None:
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
            value.path,
            value.items,
            value.cls,
            value.function,
            value.scope,
            value.grad,
            value.guards,
            value.autocast,
        )

    def element(self, source: Value) -> Value:
        """Returns what a loop over a value gives."""
        if source.op == "each" and source.inputs:
            return source.inputs[0]
        if source.items:
            return self._either(list(source.items)) if len(source.items) > 1 else source.items[0]
        if source.op == "call" and source.name == "range":
            return Value(0.0, INF, kinds=frozenset({"size"}), op="element", inputs=(source,))
        made = Value(op="element", inputs=(source,), node=source.node, half=source.half)
        if source.name in ("enumerate", "zip") and source.op == "call":
            made.op = source.name
        return made

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

    # Conditions ----------------------------------------------------------------------------

    def mentioned(self, test: ast.expr) -> frozenset[str]:
        """Returns the names and expressions a condition looks at."""
        found = set()
        for node in ast.walk(test):
            if isinstance(node, ast.Name):
                found.add(node.id)
            elif isinstance(node, (ast.Attribute, ast.Call, ast.Subscript)):
                found.add(ast.unparse(node))
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
    if not states or op in ("compare", "new", "call", "matmul") and not any(states):
        return None
    return all(states)


def _mentions_tensor(annotation: ast.expr) -> bool:
    if isinstance(annotation, ast.Constant):
        return isinstance(annotation.value, str) and "Tensor" in annotation.value
    return any(
        getattr(node, "id", "") == "Tensor" or getattr(node, "attr", "") == "Tensor"
        for node in ast.walk(annotation)
    )


def hasattr_tensor(name: str) -> bool:
    """Returns whether a method is one that tensors have and modules of users rarely."""
    return name.rstrip("_") in SHAPE


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
