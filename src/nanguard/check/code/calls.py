"""Reading calls: of torch, of layers, of functions and modules of the project."""

from __future__ import annotations

import ast
import math

from nanguard.check.code.binding import Binding
from nanguard.check.code.operations import known
from nanguard.check.code.scopes import Class, Function
from nanguard.check.code.values import INF, NO_KINDS, SHAPE, SMALL, Value, kinds_of

# The class, and the operation that its forward is.
LAYERS: dict[str, str] = {
    "Softmax": "softmax",
    "Softmax2d": "softmax",
    "Sigmoid": "sigmoid",
    "LogSoftmax": "log_softmax",
    "LogSigmoid": "logsigmoid",
    "Tanh": "tanh",
    "Hardtanh": "hardtanh",
    "ReLU": "relu",
    "ReLU6": "relu6",
    "ELU": "elu",
    "GELU": "gelu",
    "SiLU": "silu",
    "Softplus": "softplus",
    "Softsign": "softsign",
    "Hardsigmoid": "hardsigmoid",
    "BCELoss": "binary_cross_entropy",
    "BCEWithLogitsLoss": "binary_cross_entropy_with_logits",
    "CrossEntropyLoss": "cross_entropy",
    "NLLLoss": "nll_loss",
    "MSELoss": "mse_loss",
    "L1Loss": "l1_loss",
    "SmoothL1Loss": "smooth_l1_loss",
    "HuberLoss": "huber_loss",
    "KLDivLoss": "kl_div",
    "CTCLoss": "ctc_loss",
    "TripletMarginLoss": "triplet_margin_loss",
    "GaussianNLLLoss": "gaussian_nll_loss",
    "CosineSimilarity": "cosine_similarity",
    "PairwiseDistance": "pairwise_distance",
    "Flatten": "flatten",
    "Unflatten": "unflatten",
    "Identity": "view",
    "Dropout": "view",
}
RECURRENT = frozenset({"RNN", "LSTM", "GRU", "RNNCell", "LSTMCell", "GRUCell"})


# Operations by other names.
# What rules look at the operands of. A call with fewer, or with operands that it names, is another
# function of that name, or half of a line: it is a call that nothing is known about.
_OPERANDS = {**dict.fromkeys(("abs", "neg", "part"), 1), "sub": 2, "rsub": 2}
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
# What gives a module back that computes the same.
_WRAPPERS = frozenset({"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"})
_REPARAMETRISES = frozenset({"weight_norm", "spectral_norm", "compile", "orthogonal"})
# Where operations on numbers come from.
_TORCH = ("torch.", "math.", "numpy.", "einops.", "torchvision.")


def _operation(name: str, inputs: tuple[Value, ...]) -> str:
    """Returns what a function of torch does, in one spelling."""
    op = _ALIASES.get(name.rstrip("_"), name.rstrip("_"))
    return op if len(inputs) >= _OPERANDS.get(op, 0) else "call"


class Calls(Binding):
    """Reads calls."""

    def _call(self, node: ast.Call) -> Value:
        path = self.code.names.path(node.func)
        if not path and isinstance(node.func, ast.Attribute):
            return self._method(node, node.func)
        made = self._elsewhere(node, path)
        return made if made is not None else self._plain_call(node, path)

    def _plain_call(self, node: ast.Call, path: str) -> Value:
        """Reads a call of something of this file, of a library, or of nobody knows what."""
        callee = self.value(node.func)
        if callee.op == "":
            path = path or callee.path
        cls = self._class_named(node.func, callee)
        inputs = tuple(self.value(argument) for argument in node.args)
        keywords = {k.arg or "**": self.value(k.value) for k in node.keywords}
        if callee.function is not None:
            return self._local(node, callee.function, inputs, keywords)
        if isinstance(node.func, ast.Name) and node.func.id in self.code.classes and not path:
            return self._instance(node, self.code.classes[node.func.id], inputs, keywords)
        if cls is not None:
            return self._instance(node, cls, inputs, keywords)
        if path:
            return self._imported(node, path, inputs, keywords)
        if callee.op in ("new", "join", "each") or callee.cls is not None:
            return self._called(node, callee, inputs, keywords)
        if isinstance(node.func, ast.Name):
            made = self._builtin(node, node.func.id, inputs, keywords)
            if made is not None:
                return made
        return self._unknown_call(node, callee, inputs, keywords)

    def _class_named(self, func: ast.expr, callee: Value) -> Class | None:
        """Returns the class of the project that a name stands for which was given one."""
        meant = callee.core.node
        if callee.core.op or callee.core.cls is not None or meant is func:
            return None  # an instance, as an annotation says, or the name itself
        if not isinstance(meant, (ast.Name, ast.Attribute)):
            return None
        if isinstance(meant, ast.Name) and meant.id in self.code.classes:
            return self.code.classes[meant.id]
        found = self.code.found(meant)
        return found if isinstance(found, Class) else None

    def _elsewhere(self, node: ast.Call, path: str) -> Value | None:
        """Reads a call of a function or class of another file of the project."""
        if self.code.project is None or not (path or self.code.names.stars):
            return None
        root: ast.expr = node.func
        while isinstance(root, ast.Attribute):
            root = root.value
        if isinstance(root, ast.Name) and self.lookup(root.id) is not None:
            return None
        found = self.code.found(node.func)
        if not isinstance(found, (Function, Class)):
            return None
        inputs = tuple(self.value(argument) for argument in node.args)
        keywords = {k.arg or "**": self.value(k.value) for k in node.keywords}
        if isinstance(found, Class):
            made = self._instance(node, found, inputs, keywords)
            made.path = path
            return made
        return self._local(node, found, inputs, keywords)

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
                if len(inputs) > 1 and name in ("max", "min"):
                    op += "imum"
                made = self.make(op, node, inputs, keywords)
                if name == "int":
                    made.const = inputs[0].const
                elif name == "abs" and inputs[0].number() is not None:
                    made.const = abs(inputs[0].const)
                return made
        return None

    def _imported(
        self, node: ast.Call, path: str, inputs: tuple[Value, ...], keywords: dict[str, Value]
    ) -> Value:
        last = path.rpartition(".")[2]
        wrapped = self._wrapped(node, path, inputs, keywords)
        if wrapped is not None:
            return wrapped
        if last[:1].isupper() and last not in ("Tensor", "FloatTensor"):
            made = self.make("new", node, inputs, keywords, event=True)
            made.path = path
            if last in _WRAPPERS and inputs:
                made.cls = self.class_of(inputs[0])
            return made
        if not path.startswith(_TORCH):
            made = self.make("call", node, inputs, keywords, event=True)
            made.path = path
            made.name = last
            return made
        op = _operation(last, inputs)
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

    def _wrapped(
        self, node: ast.Call, path: str, inputs: tuple[Value, ...], keywords: dict[str, Value]
    ) -> Value | None:
        """Reads what torch only wraps: a parameter, a variable of old, a module's weight."""
        last = path.rpartition(".")[2]
        if not path.startswith("torch."):
            return None
        if last == "Parameter" and path.startswith("torch.nn"):
            return self.make("parameter", node, inputs, keywords, event=True)
        if last in _REPARAMETRISES and inputs:
            return inputs[0]
        if last == "Variable" and inputs:
            return self.make("as_tensor", node, inputs[:1], keywords, event=True)
        return None

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
        if op == "spacing":  # the eps of numpy
            made.lo = SMALL
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
            if cls.is_module() and not (_is_generic(func.attr) or func.attr in _REGISTERS):
                return self._unknown_call(node, receiver, inputs, keywords, func.attr)
            if func.attr in _REGISTERS:
                self._registered(cls, inputs, keywords, parameter=func.attr == _REGISTERS[1])
        if receiver.function is not None:
            return self._unknown_call(node, receiver, inputs, keywords, func.attr)
        op = _operation(func.attr, (receiver, *inputs))
        made = self.make(op, node, (receiver, *inputs), keywords, event=True)
        made.name = func.attr
        if func.attr in _APPENDS and (inputs or "module" in keywords):
            last = keywords.get("module") or inputs[-1]
            self.rebind(func.value, self._appended(node, receiver, last))
        if func.attr.endswith("_") and not func.attr.startswith("_"):
            self.rebind(func.value, made)
        if op in ("half", "float", "to", "cuda", "train", "eval", "requires_grad"):
            made.cls, made.path = receiver.cls, receiver.path
        self._literal_tensor(made)
        return made

    def _appended(self, node: ast.Call, receiver: Value, last: Value) -> Value:
        """Returns a list, or a stack of layers, with one more thing behind the others."""
        items = (*receiver.items, last) if receiver.items is not None else None
        path = receiver.core.path if receiver.core.op in ("new", "appended") else ""
        return Value(
            op="appended", inputs=(receiver, last), node=node, items=items, path=path,
            scope=self.scope, cls=receiver.cls, guards=self.guards,
        )  # fmt: skip

    def _registered(
        self, cls: Class, inputs: tuple[Value, ...], keywords: dict[str, Value], *, parameter: bool
    ) -> None:
        """Gives ``self`` the attribute that ``self.register_buffer(name, tensor)`` makes."""
        name = keywords.get("name") or (inputs[0] if inputs else None)
        tensor = keywords.get("tensor") or keywords.get("param")
        tensor = tensor or (inputs[1] if len(inputs) > 1 else None)
        if name is None or tensor is None or not isinstance(name.const, str):
            return
        if parameter and tensor.core.op != "parameter":
            return
        held = tensor
        if not parameter:
            held = self.make("buffer", tensor.node or self.scope.node, (tensor,))
        cls.attributes.setdefault(name.const, []).append(self.renamed(held, name.const))

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
            options = [option for option in callee.inputs if _is_callable(option)]
            given = [self._called(node, option, inputs, keywords) for option in options[:3]]
            if given:
                return given[0] if len(given) == 1 else self._one_of(node, given)
        if callee.function is not None:
            return self._local(node, callee.function, inputs, keywords)
        cls = self.class_of(callee)
        if cls is not None:
            method = cls.method("forward") or cls.method("__call__")
            if method is not None:
                return self._local(node, method, inputs, keywords, callee)
            return self._unknown_call(node, callee, inputs, keywords)
        layer = _unwrapped(callee)
        last = layer.path.rpartition(".")[2] if layer.op == "new" else ""
        if last == "Sequential" or layer.op == "appended":
            final = last_layer(layer)
            if final is not None and final.path.rpartition(".")[2] in LAYERS:
                return self._called(node, final, inputs, keywords)
        if layer.path.startswith("torch.nn.") and last in LAYERS:
            made = self.make(LAYERS[last], node, inputs, {**layer.keywords, **keywords}, event=True)
            made.path = layer.path
            return made
        return self._unknown_call(node, callee, inputs, keywords)

    def _one_of(self, node: ast.Call, made: list[Value]) -> Value:
        """Returns what calling one of several things gives."""
        result = self.either(made)
        result.node, result.scope, result.grad = node, self.scope, self.grad
        result.guards, result.autocast = self.guards, self.autocast
        return result

    def _unknown_call(
        self,
        node: ast.Call,
        callee: Value,
        inputs: tuple[Value, ...],
        keywords: dict[str, Value],
        method: str = "",
    ) -> Value:
        if not method and callee.op in ("", "element"):
            cls = self.code.class_meant(callee.name, len(inputs) + len(keywords))
            forward = cls.method("forward") if cls is not None else None
            if cls is not None and forward is not None and forward is not self.scope:
                return self._local(node, forward, inputs, keywords, Value(cls=cls))
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
            made.op = "result"
            made.inputs = (result,)
            made.keywords = {}
        if receiver is not None and self.class_of(receiver) is not None:
            cls = self.class_of(receiver)
            if cls is not None and cls.is_module() and function.name == "forward":
                made.kinds |= {"network"}
        return made

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


# Methods that give a module an attribute: a buffer, a parameter.
_REGISTERS = ("register_buffer", "register_parameter")
# Methods that put one more thing behind those a list or a stack of layers holds.
_APPENDS = frozenset({"append", "add_module", "register_module"})
# Layers that leave numbers as they are, so that the one before them makes the result.
_KEEPS = frozenset({"Dropout", "Dropout2d", "Flatten", "Unflatten", "Identity"})


def last_layer(stack: Value, depth: int = 8) -> Value | None:
    """Returns the layer that a stack of layers ends with; None if that is not known."""
    layer = _unwrapped(stack)
    if depth <= 0:
        return None
    if layer.op == "new" and layer.path.rpartition(".")[2] != "Sequential":
        return layer if layer.path.startswith("torch.nn.") else None
    if layer.op == "appended":
        ends = [layer.inputs[1]]
    elif layer.op == "join":
        ends = [*reversed(layer.inputs)]
    else:
        ends = [*reversed(layer.items if layer.op != "new" and layer.items else layer.inputs)]
    for end in ends:
        final = last_layer(end, depth - 1)
        if final is None or final.path.rpartition(".")[2] not in _KEEPS:
            return final
    return None


def _is_callable(value: Value) -> bool:
    if value.op in ("named", "join") and value.inputs:
        return any(map(_is_callable, value.inputs))
    stacked = value.op == "appended" and value.path == "torch.nn.Sequential"
    return value.op == "new" or stacked or value.cls is not None or value.function is not None


def _unwrapped(callee: Value) -> Value:
    """Returns the module inside of wrappers that compute the same."""
    layer = callee.core
    while layer.path.rpartition(".")[2] in _WRAPPERS and layer.inputs:
        layer = layer.inputs[0].core
    return layer


def _is_generic(method: str) -> bool:
    """Returns whether every module or tensor has such a method."""
    return method in ("half", "float", "to", "cuda", "train") or (
        method.startswith("_") or method.rstrip("_") in SHAPE
    )
