"""``torch.where`` in front of a branch that is not finite everywhere."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.code_rule import CodeRule
from nanguard.check.code.training_path import is_about_training
from nanguard.check.code.value_questions import can_be_zero, carries_gradient, is_bounded, names_of
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Finding, Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.values import Value

# How far behind a branch an operation still counts as part of it.
_OPERATIONS_BEHIND = 10
# Counts and random numbers carry no gradient.
_NO_GRADIENT = ("count", "masksum", "uniform", "size")
_STOP = frozenset({"where", "matmul", "call", "each"})
_SINGULAR = frozenset({"log", "log2", "log10", "sqrt", "rsqrt", "reciprocal"})

# Numbers of things, which are not computed by what is trained.
_SIZE = re.compile(r"(num|n|nb)_|(n|num)$")


class WhereGradientTrap(CodeRule):
    """`torch.where` that hides a singular branch.

    *Why it breaks a run*: both branches are computed, and both are differentiated. The branch that
    was not chosen gets a gradient of 0, and 0 times an infinite derivative is NaN: the forward
    pass looks right while the weights are lost.

    Make the input safe, then compute: `safe = torch.where(x > 0, x, 1.0)`, and
    `torch.where(x > 0, safe.log(), 0.0)`.
    """

    code = "SRC023"
    name = "where-gradient-trap"
    severity = Severity.WARNING
    claim = "value"
    seen_in = "https://github.com/pytorch/pytorch/issues/52248"
    examples: ClassVar = (
        Fails(
            "import torch\n\n\ndef f(x):\n"
            "    return torch.where(x > 0, torch.log(x), torch.zeros_like(x))\n",
            line=5,
        ),
        Fails(
            "import torch\n\n\ndef sinc(x):\n    y = torch.sin(x) / x\n"
            "    return torch.where(x == 0, torch.ones_like(x), y)\n",
            line=6,
        ),
        Passes(
            "import torch\n\n\ndef f(x):\n    safe = torch.where(x > 0, x, torch.ones_like(x))\n"
            "    return torch.where(x > 0, safe.log(), torch.zeros_like(x))\n"
        ),
        Passes(
            "import torch\n\n\ndef huber(x, d=1.0):\n    a = x.abs()\n"
            "    return torch.where(a < d, 0.5 * x.pow(2), d * (a - 0.5 * d))\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        trains = is_about_training(code)
        for choice in code.of("where"):
            if len(choice.inputs) < 3 or not choice.grad:
                continue
            condition, *branches = choice.inputs[:3]
            looked_at = set(names_of(condition, 16))
            for branch in branches:
                culprit = _singular(branch, looked_at)
                if culprit is not None and not _compares_results(condition, culprit):
                    yield self.at(
                        code,
                        choice.node,
                        f"the branch with {_word(culprit)} is differentiated even where it is not "
                        "chosen: 0 times an infinite derivative is NaN",
                        fixes=(Fix("make the input safe with a where before the operation"),),
                        shown=_is_asked_for(condition, culprit),
                        weak=not trains or culprit.inputs[-1].has(*_NO_GRADIENT),
                    )
                    break


def _is_asked_for(condition: Value, culprit: Value) -> bool:
    """Returns whether the condition looks for the very point: the same value, beside a 0."""
    risky, core = _risky_input(culprit), condition.core
    if risky is None or core.op != "compare" or len(core.inputs) < 2:
        return False
    at_zero = any(part.number() == 0 for part in core.inputs)
    same = any(part.core is risky.core for part in core.inputs)
    return at_zero and same and carries_gradient(risky)


def _compares_results(condition: Value, culprit: Value) -> bool:
    """Returns whether a condition compares what the operation made with something not fixed."""
    core = condition.core
    if core.op != "compare" or any(part.lo == part.hi or part.has("eps") for part in core.inputs):
        return False
    return any(part is culprit for given in core.inputs for part in given.upstream(16))


def _word(value: Value) -> str:
    return "the division" if value.op == "div" else value.op


def _singular(branch: Value, looked_at: set[str]) -> Value | None:
    """Returns the operation of a branch that has no finite derivative somewhere."""
    for part in branch.upstream(_OPERATIONS_BEHIND):
        if part.op in _STOP or not part.grad or not part.inputs:
            if part is branch:
                return None
            continue
        risky = _risky_input(part)
        if risky is not None and (risky.has("sumsq", "var", "square") or _shares(risky, looked_at)):
            return part
    return None


def _risky_input(part: Value) -> Value | None:
    """Returns the input at which an operation is singular, if nothing keeps it away from there."""
    value = part.inputs[0]
    if part.op == "exp":
        return None if is_bounded(value) else value
    if part.op in ("acos", "asin"):
        return value if value.lo <= -1 or value.hi >= 1 else None
    if part.op == "div":
        value = part.inputs[-1]
        known = len(part.inputs) < 2 or value.number() is not None
        return None if known or not can_be_zero(value) else value
    if part.op == "pow":
        exponent = part.arg(1, "exponent")
        number = None if exponent is None else exponent.number()
        if number is None or number >= 1 or number == 0:
            return None
    elif part.op not in _SINGULAR:
        return None
    return value if can_be_zero(value) else None


def _shares(value: Value, looked_at: set[str]) -> bool:
    return any(name in looked_at for name in names_of(value) if not _SIZE.match(name))
