"""The part a value plays in training: a loss, a gradient, a gradient's norm."""

from __future__ import annotations

import ast
import re
from functools import cached_property
from typing import TYPE_CHECKING

from nanguard.check.code.training import Training, losses_of
from nanguard.check.code.values import SHAPE, Value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.scopes import Function

_NO_LOSS = re.compile(
    r"weight|mask|scale|coef|factor|ratio|_fn$|func|mult|type|dict|hist|meter|list|name|config|lambda",
    re.IGNORECASE,
)
_GRADIENT = re.compile(r"(^|_)(grads?|gradients?)($|_)|^g$|^dw$", re.IGNORECASE)
# Names by which the results of operations go, which say nothing about the value.
_ARITHMETIC = frozenset({"add", "sub", "mul", "div", "neg", "mean", "sum", "total", "abs"})
# What may be done to a loss between where it is made and backward.
_ON_THE_WAY = _ARITHMETIC | SHAPE | {"join", "scale", "local", "where", "masked_fill", "setitem"}
_ON_THE_WAY |= {"nan_to_num", "clamp", "min", "minimum", "clamp_max", "field", "part", "each"}


def root(value: Value) -> Value:
    """Returns the value whose numbers these are, under the first name it was given."""
    base = value
    while value.op in SHAPE and value.inputs:
        if value.op == "named":
            base = value
        value = value.inputs[0]
    return base if base.op == "named" else value


def label(value: Value) -> str:
    """Returns a name by which two mentions of a value can be told to be the same."""
    base = root(value)
    if base.op == "grad" and base.inputs:
        return label(base.inputs[0]) + ".grad"
    return base.name


class Roles:
    """The parts that the values of a file play in training.

    Attributes:
        code: The file.
        trained: The names from which backward passes start, by the function they are in.
    """

    def __init__(self, code: Code) -> None:
        self.code = code
        self.trained: dict[int, set[str]] = {}
        for backward in Training.of(code).backwards:
            names = self.trained.setdefault(id(backward.scope), set())
            for loss in losses_of(backward):
                names |= set(_summands(loss))

    @classmethod
    def of(cls, code: Code) -> Roles:
        """Returns the parts that the values of a file play, worked out once."""
        known: Roles | None = code.facts.get(cls)
        if known is None:
            known = code.facts[cls] = cls(code)
        return known

    def role(self, value: Value) -> str:
        """Returns ``loss``, ``gradient``, ``norm``, or nothing."""
        base = root(value)
        if self.is_gradient(base):
            return "gradient"
        if base.has("gradnorm") or base.op in ("get_total_norm", "clip_grad_norm"):
            plain = any(made.op in ("norm", "vector_norm") for made in base.upstream(4))
            if not plain or any(self.is_gradient(made) for made in base.upstream(12)):
                return "norm"
        if self.is_loss(base):
            return "loss"
        return ""

    def is_gradient(self, value: Value) -> bool:
        """Returns whether a value is a gradient."""
        if value.has("gradient") or value.op == "grad":
            return True
        if value.op in ("named", "element", "part", "") and _GRADIENT.search(value.name):
            return not value.has("gradnorm")
        return value.op in ("named", "element") and any(
            made.op == "grad" for made in value.upstream(4)
        )

    def is_loss(self, value: Value) -> bool:
        """Returns whether a value is a loss."""
        base = root(value)
        if base.op == "attribute" and base.name == "output" and base.inputs[0].name == "state":
            # What the step of an ignite engine gives back, as a rule its loss.
            return self.code.names.imported("ignite")
        if value.has("loss") and value.op == "named" and not _NO_LOSS.search(value.name):
            return True
        if _NO_LOSS.search(base.name) or base.has("count", "size"):
            return False
        if base.has("loss"):
            return True
        if base.op in _ARITHMETIC and base.inputs:
            return any(self.is_loss(part) for part in base.inputs)
        if base.op == "named" and base.inputs[0].op in ("part", "element"):
            return any(m.has("loss") and not _NO_LOSS.search(m.name) for m in base.upstream(6))
        return bool(base.name) and base.name in self.trained.get(id(base.scope), ())

    def is_trained_on(self, value: Value, within: Function | None = None) -> bool:
        """Returns whether a loss reaches a backward pass, or is what its function gives back.

        Args:
            value: The loss.
            within: The function it is in, where the value does not know, as a number does not.
        """
        if id(value) in self._reaching:
            return True
        for outer in self.code.ancestors(value.node) if value.node is not None else ():
            if isinstance(outer, ast.Lambda):
                function = self.code.function_of(outer)
                return any(_leads_to(r, value) for r in function.returns) if function else False
            if isinstance(outer, ast.stmt):
                break
        scope = value.scope or within
        return scope is not None and any(_leads_to(result, value) for result in scope.returns)

    @cached_property
    def _reaching(self) -> set[int]:
        found: set[int] = set()
        for backward in Training.of(self.code).backwards:
            for loss in losses_of(backward):
                found |= {id(made) for made in _made_from(loss)}
        return found


def _summands(loss: Value, depth: int = 4) -> Iterator[str]:
    """Yields the names of what is summed up to a loss, and scaled."""
    if loss.op in ("named", "") and loss.name:
        if not loss.has("network"):
            yield loss.name
    elif loss.op in ("add", "mul", "div", "scale", "sub") and depth:
        for part in loss.inputs:
            yield from _summands(part, depth - 1)


def _made_from(value: Value) -> Iterator[Value]:
    """Yields a loss and the losses it was made from."""
    seen: set[int] = set()
    queue = [value]
    while queue and len(seen) < 96:
        made = queue.pop()
        if id(made) in seen:
            continue
        seen.add(id(made))
        yield made
        if made.op in _ON_THE_WAY and made.name not in ("item", "detach", "numpy", "tolist"):
            queue += made.inputs
            queue += made.items or ()


def _leads_to(result: Value, value: Value) -> bool:
    results = result.items or (result,)
    return any(made is value for part in results for made in _made_from(part))
