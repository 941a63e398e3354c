"""Where a file computes in float16: models, parameters, autocast regions, and what runs in them."""

from __future__ import annotations

import ast
import re
from functools import cached_property
from typing import TYPE_CHECKING

from nanguard.check.code.flow import autocast_type
from nanguard.check.code.origins import origins
from nanguard.check.code.training import Training, conditions_of, named

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.scopes import Class, Function
    from nanguard.check.code.values import Value

# What autocast computes in float32 whatever it is given.
FLOAT32 = frozenset(
    {
        "softmax", "log_softmax", "norm", "vector_norm", "exp", "log", "log10", "log2", "log1p",
        "pow", "prod", "sum", "cumsum", "cumprod", "rsqrt", "reciprocal", "cosine_similarity",
        "layer_norm", "group_norm", "mse_loss", "l1_loss", "cross_entropy", "nll_loss", "kl_div",
        "cdist", "dist", "renorm", "acos", "asin", "cosh", "sinh", "tan", "erfinv", "expm1",
        "softplus", "smooth_l1_loss", "normalize", "logsumexp",
    }
)  # fmt: skip
# What autocast computes in float16.
FLOAT16 = frozenset(
    {"matmul", "einsum", "linear", "addmm", "baddbmm", "addbmm", "bmm", "mm", "conv2d"}
)
_LAYERS = re.compile(r"^torch\.nn\.(Linear|Conv\w+|Bilinear|MultiheadAttention|LSTM|GRU)$")
_ANY_MODEL = re.compile(
    r"^(model|net|network|module|layer|block|lm|gpt|self|transformer|backbone)s?$|_model$|_net$"
)
_UNKNOWN = frozenset({"", "named", "element", "attribute"})
_USE = re.compile(r"eval|test|infer|train|predict|deploy|export|demo|sampl")
_FP16 = re.compile(r"^(fp16|float16|half|16|16-mixed|16-true)$")


class Halves:
    """What a file says about float16.

    Attributes:
        code: The file.
        training: How it trains.
    """

    def __init__(self, code: Code) -> None:
        self.code = code
        self.training = Training.of(code)
        self._known: dict[int, bool | None] = {}

    @classmethod
    def of(cls, code: Code) -> Halves:
        """Returns what a file says about float16, worked out once."""
        known: Halves | None = code.facts.get(cls)
        if known is None:
            known = code.facts[cls] = cls(code)
        return known

    @cached_property
    def possible(self) -> bool:
        """Whether the file mentions float16 at all."""
        text = self.code.text.content
        return self.code.relevant and ("half" in text or "float16" in text or self.casts)

    @cached_property
    def casts(self) -> bool:
        """Whether models of the file run in a float16 autocast region, here or as configured."""
        regions = [autocast_type(region) for region in self.code.of("autocast")]
        if "float16" in regions:
            return True
        for call in self.training.called("GradScaler"):
            enabled = call.keywords.get("enabled")
            if not regions and not (enabled is not None and enabled.const is False):
                return True
        for name in ("Accelerator", "Trainer", "Fabric", "TrainingArguments"):
            for call in self.training.called(name):
                for key in ("mixed_precision", "precision"):
                    if key in call.keywords and _FP16.match(str(call.keywords[key].const)):
                        return True
                if "fp16" in call.keywords and call.keywords["fp16"].const is True:
                    return True
        return False

    @cached_property
    def halved(self) -> list[Value]:
        """The models, modules and tensors that are cast to float16."""
        return [value for value in self.code.of("half", "to", "type") if value.half is True]

    @cached_property
    def classes(self) -> set[int]:
        """The classes of the file of which an instance is cast to float16, with what they hold."""
        found: set[int] = set()
        modules = [cls for cls in self.code.classes.values() if cls.is_module()]
        for value in self.halved:
            target = value.inputs[0]
            cls = target.cls or target.core.cls
            if cls is not None:
                self._with_parts(cls, found)
            elif any(_ANY_MODEL.search(m.name) for m in target.upstream(5) if m.op in _UNKNOWN):
                found |= {id(module) for module in modules}
        return found

    def _with_parts(self, cls: Class, found: set[int]) -> None:
        if id(cls) in found:
            return
        found.add(id(cls))
        for ancestor in cls.line_of_descent():
            for values in ancestor.attributes.values():
                for value in values:
                    for made in value.upstream(12):
                        if made.cls is not None:
                            self._with_parts(made.cls, found)

    def mode(self, function: Function | None, depth: int = 3) -> str:
        """Returns ``half`` or ``autocast`` where a function runs in float16, else nothing."""
        if function is None or function.name == "__init__":
            return ""
        cls = function.cls
        if cls is not None and cls.is_module():
            if id(cls) in self.classes:
                return "half"
            return "autocast" if self.casts else ""
        callers = self.training.callers(function) if depth else []
        for call in callers:
            if call.autocast == "float16":
                return "autocast"
            mode = self.mode(call.scope, depth - 1)
            if mode:
                return mode
        if not callers and self.casts and not self._has_region(function):
            return "autocast" if function is not self.code.module else ""
        return ""

    def _has_region(self, function: Function) -> bool:
        return any(v.scope is function for v in self.code.of("autocast", "backward"))

    def is_half(self, value: Value, depth: int = 24) -> bool:
        """Returns whether a value is surely float16 where the file is run as it says."""
        key = id(value)
        if key not in self._known:
            self._known[key] = None
            self._known[key] = self._judge(value, depth)
        return bool(self._known[key])

    def _judge(self, value: Value, depth: int) -> bool:
        if value.half is not None:
            return value.half
        if depth <= 0 or value.number() is not None:
            return False
        if value.autocast and value.autocast != "float16":
            return False
        mode = self.mode(value.scope)
        casts = value.autocast == "float16" or mode == "autocast"
        if casts and value.op in FLOAT32:
            return False
        if casts and (value.op in FLOAT16 or self._is_layer(value)):
            return not self._is_switched_off(value)
        if not value.op:
            return self._is_input(value)
        if self._any(value, depth):
            return not casts or named(value) not in FLOAT32
        return mode == "half" and (self._is_layer(value) or self._is_module(value))

    def _any(self, value: Value, depth: int) -> bool:
        """One float16 tensor makes the result so, unless a float32 tensor is among the inputs."""
        if value.op in ("compare", "size", "shape", "new", "attribute", "not", "and", "or"):
            return False
        like = _type_of(value)
        if like is not None:
            return self.is_half(like, depth - 1)
        parts = [part for part in value.inputs if part.number() is None]
        if value.op in ("getitem", "masked_fill", "setitem", "gather", "part"):
            parts = parts[:1]
        elif value.op == "where":
            parts = parts[1:]
        if any(part.half is False for part in parts):
            return False
        return any(self.is_half(part, depth - 1) for part in parts)

    def _is_layer(self, value: Value) -> bool:
        if value.op != "call" or not value.inputs:
            return False
        if value.autocast == "float16" and value.has("network"):
            return True
        return any(_LAYERS.search(made.path) for made in value.inputs[0].upstream(6))

    def _is_module(self, value: Value) -> bool:
        """Whether a value comes out of any module of torch, as its weights are float16."""
        made_by = value.inputs[0].core if value.op == "call" and value.inputs else None
        return made_by is not None and made_by.path.startswith("torch.nn.")

    def _is_input(self, value: Value) -> bool:
        """Whether a value is what the forward of a halved model is given."""
        for cls in self.code.classes.values():
            if id(cls) in self.classes and "forward" in cls.methods:
                parameters = cls.methods["forward"].parameters
                if parameters.get(value.name) is value:
                    return not value.has("mask", "labels", "size") and value.name not in (
                        "self",
                        "ids",
                    )
        return False

    def _is_switched_off(self, value: Value) -> bool:
        """Whether an autocast region that is off lies around it."""
        if value.node is None:
            return False
        return any(_turns_off(item) for item in _regions(self.code, value.node))


def _type_of(value: Value) -> Value | None:
    """The value whose type an operation's result is given."""
    if value.op == "type_as" and len(value.inputs) > 1:
        return value.inputs[1]
    given = [value.keywords["dtype"]] if "dtype" in value.keywords else []
    given += value.inputs[1:] if value.op == "to" else ()
    for dtype in given:
        if dtype.op == "attribute" and dtype.name == "dtype":
            return dtype.inputs[0]
    return None


def _regions(code: Code, node: ast.AST) -> Iterator[ast.expr]:
    for outer in code.ancestors(node):
        if isinstance(outer, (ast.With, ast.AsyncWith)):
            yield from (item.context_expr for item in outer.items)
        elif isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from outer.decorator_list


def _turns_off(node: ast.expr) -> bool:
    if not isinstance(node, ast.Call):
        return False
    last = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    off = [k.value for k in node.keywords if k.arg == "enabled"] + node.args
    return last == "autocast" and any(isinstance(a, ast.Constant) and a.value is False for a in off)


_PARAMETERS = frozenset({"parameters", "named_parameters"})
# Steps from a model to the list of its parameters.
_ON_THE_WAY = frozenset(
    {
        "named",
        "each",
        "element",
        "getitem",
        "part",
        "call",
        "chain",
        "list",
        "filter",
        "add",
        "join",
        "field",
    }
)
# What wraps a model and leaves its parameters as they are.
_WRAPS = frozenset(
    {"DistributedDataParallel", "DataParallel", "compile", "FullyShardedDataParallel", "cuda", "to"}
)
_MASTERS = frozenset({"initialize", "FP16_Optimizer", "cast_training_params", "network_to_half"})


class HalfModels:
    """The models of a file whose parameters are float16."""

    def __init__(self, code: Code) -> None:
        self.code = code
        self.training = Training.of(code)
        self.masters = any(
            call.path.startswith(("deepspeed", "apex")) or call.name != "initialize"
            for call in self.training.called(*_MASTERS)
        )
        self.frozen = {
            call.inputs[0].name
            for call in self.training.called("requires_grad", "eval")
            if call.inputs and (call.op == "eval" or call.inputs[-1].const is False)
        }
        self.upcast = any(
            value.name == "data" and value.inputs[1].half is False for value in code.of("setattr")
        )
        self.default = any(
            call.inputs and call.inputs[0].path in ("torch.float16", "torch.half")
            for call in self.training.called("set_default_dtype")
        )

    def holds(self, parameters: Value) -> bool:
        """Returns whether what an optimizer is given are parameters of a float16 model."""
        if self.masters or self.upcast:
            return False
        return any(self.is_half(model) for model in self._models(parameters))

    def _models(self, value: Value, depth: int = 12) -> Iterator[Value]:
        """Yields the models whose parameters a value holds, unless they are copied on the way."""
        if depth <= 0 or value.half is False:
            return
        if named(value) in _PARAMETERS and value.inputs:
            yield value.inputs[0]
            return
        node = value.node
        if isinstance(node, ast.Call) and value.op == "call" and named(value) in _PARAMETERS:
            yield value
        if value.op in _ON_THE_WAY or not value.op:
            for part in (*value.inputs, *(value.items or ()), *self._given(value)):
                yield from self._models(part, depth - 1)
        if isinstance(node, (ast.ListComp, ast.GeneratorExp)) and value.op == "each":
            for generator in node.generators:
                source = self.code.values.get(generator.iter)
                if source is not None:
                    yield from self._models(source, depth - 1)

    def _given(self, value: Value) -> Iterator[Value]:
        """What callers pass for a parameter of a function."""
        if value.op or not value.name:
            return
        for function in self.code.functions:
            if function.parameters.get(value.name) is value:
                for call in self.training.callers(function):
                    given = self.training.argument(call, function, value.name)
                    if given is not None:
                        yield given
                if self.code.project is not None and not self.training.callers(function):
                    yield from (m for m in origins(self.code, value).makers if m.cls is not None)

    def is_half(self, model: Value, depth: int = 8) -> bool:
        """Returns whether a model's parameters are float16."""
        if depth <= 0:
            return False
        cast = self._cast_in_place(model)
        if cast is not None:
            return cast
        if model.half is not None:
            return model.half
        if _loads_half(model) or (self.default and model.op == "new"):
            return True
        wraps = model.op == "new" and model.path.rpartition(".")[2] in _WRAPS
        if (
            model.op in ("named", "cuda", "to", "train", "eval", "compile", "requires_grad")
            or wraps
        ):
            return any(self.is_half(part, depth - 1) for part in model.inputs[:1])
        if any(self.is_half(part, depth - 1) for part in self._parts(model)):
            return True
        return any(self.is_half(given, depth - 1) for given in self._given(model))

    def _parts(self, model: Value) -> Iterator[Value]:
        """Yields the modules that a model of the file holds and that are trained."""
        cls = model.cls or model.core.cls
        for owner in cls.line_of_descent() if cls is not None else ():
            for name, values in owner.attributes.items():
                if name not in self.frozen:
                    yield from (value for value in values if value.op not in ("", "attribute"))

    def _cast_in_place(self, model: Value) -> bool | None:
        """What ``model.half()`` or ``model.float()`` as a statement made of it, the last one."""
        if not model.name or model.op not in ("named", "", "new", "attribute"):
            return None
        found: bool | None = None
        home = model.scope.home if model.scope is not None else None
        code = home if home is not None else self.code  # where its module is made
        for cast in code.of("half", "to", "float", "bfloat16", "type"):
            receiver = cast.inputs[0] if cast.inputs else None
            if receiver is None or cast.half is None or cast.node is None:
                continue
            alone = isinstance(code.parents.get(cast.node), ast.Expr)
            if code is not self.code and (cast.scope is not model.scope or _is_to_use(code, cast)):
                continue
            if alone and receiver.name == model.name and _same_place(cast.scope, model.scope):
                found = cast.half
        return found


def _is_to_use(code: Code, cast: Value) -> bool:
    """Returns whether a model is cast under a condition that says it is not trained then."""
    conditions = conditions_of(code, cast.node) if cast.node is not None else ()
    return any(_USE.search(text.lower()) for text, _ in conditions)


def _same_place(one: Function | None, other: Function | None) -> bool:
    if one is None or other is None or one is other:
        return True
    return one.cls is not None and one.cls is other.cls


def _loads_half(model: Value) -> bool:
    if named(model) not in ("from_pretrained", "from_config"):
        return False
    for key in ("torch_dtype", "dtype"):
        given = model.keywords.get(key)
        if given is None:
            continue
        if given.path in ("torch.float16", "torch.half") or given.const in ("float16", "half"):
            return True
    return False
