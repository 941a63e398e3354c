"""Which parameters are float16, so that an optimizer's state is too."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from nanguard.check.code.training import Training, named

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.scopes import Function
    from nanguard.check.code.values import Value

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
        for cast in self.code.of("half", "to", "float", "bfloat16", "type"):
            receiver = cast.inputs[0] if cast.inputs else None
            if receiver is None or cast.half is None or cast.node is None:
                continue
            alone = isinstance(self.code.parents.get(cast.node), ast.Expr)
            if alone and receiver.name == model.name and _same_place(cast.scope, model.scope):
                found = cast.half
        return found


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
