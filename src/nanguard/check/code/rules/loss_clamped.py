"""A loss with an upper bound."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.code_rule import CodeRule
from nanguard.check.code.training import ValueRoles
from nanguard.check.code.value_questions import carries_gradient, is_number
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Finding, Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.values import Value

_FIX = Fix(
    "take the bound away and clip gradients instead: "
    "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
)


class LossClamped(CodeRule):
    """A loss is clamped to a maximum before backward.

    *Why it breaks a run*: above the bound a clamp is flat and its gradient is exactly zero. The
    batches that are worst teach nothing, a model that starts above the bound never starts, and NaN
    passes the clamp unchanged.

    Clip the gradients (`clip_grad_norm_`), which keeps their direction, or use a loss that grows
    more slowly, such as `smooth_l1_loss`. A lower bound, as in free bits, is fine.
    """

    code = "SRC011"
    name = "loss-clamped"
    severity = Severity.WARNING
    seen_in = "https://github.com/Alibaba-MIIL/ASL/issues/106"
    examples: ClassVar = (
        Fails(
            "import torch\n\n\ndef step(model, x, opt):\n    loss = model(x).mean()\n"
            "    loss = torch.clamp(loss, max=10.0)\n    loss.backward()\n    opt.step()\n",
            line=6,
        ),
        Fails(
            "import torch\nimport torch.nn.functional as F\n\n\ndef criterion(logits, y):\n"
            '    losses = F.cross_entropy(logits, y, reduction="none")\n'
            "    return torch.minimum(losses, torch.tensor(5.0)).mean()\n",
            line=7,
        ),
        Passes(
            "import torch\n\n\ndef step(model, x, opt, free_bits):\n    kl_loss = model(x)\n"
            "    loss = kl_loss.clamp(min=free_bits).sum()\n    loss.backward()\n"
        ),
        Passes(
            "import torch\nimport torch.nn.functional as F\n\n\ndef perplexity(logits, y):\n"
            "    loss = F.cross_entropy(logits, y)\n    return loss.clamp(max=20.0).exp()\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        roles = ValueRoles.of(code)
        for value in code.of("clamp", "clamp_max", "minimum", "min", "hardtanh"):
            if value.node is None or not value.grad or not value.inputs:
                continue
            if _never_reached(value) or any(is_number(part) for part in value.inputs):
                continue
            if not carries_gradient(value):
                continue
            if _bounds_above(value) and _is_loss(roles, value) and roles.is_trained_on(value):
                message = "a clamped loss has no gradient above its bound"
                yield self.at(code, value.node, message, fixes=(_FIX,))


def _is_loss(roles: ValueRoles, value: Value) -> bool:
    return any(roles.is_loss(part) for part in value.inputs[:2]) or _is_in_a_loss(value)


def _is_in_a_loss(value: Value) -> bool:
    """Whether it is an error that a loss of the file has worked out."""
    scope = value.scope
    if scope is None or not value.inputs[0].has("sumsq"):
        return False
    names = f"{scope.name} {scope.cls.name if scope.cls is not None else ''}".lower()
    return "loss" in names or "criterion" in names


def _never_reached(value: Value) -> bool:
    """Whether the loss stays below the bound anyway."""
    bound = value.arg(1 if value.op == "clamp_max" else 2, "max")
    number = bound.number() if bound is not None else None
    return value.op.startswith("clamp") and number is not None and value.inputs[0].hi <= number


def _bounds_above(value: Value) -> bool:
    if value.op == "clamp_max":
        return True
    if value.op == "clamp":
        bound = value.arg(2, "max")
        return bound is not None and bound.name != "None"
    if value.op == "hardtanh":
        return True
    # The smaller of two tensors is a choice; the smaller of a tensor and a number is a bound.
    return len(value.inputs) == 2 and any(part.lo == part.hi for part in value.inputs)
