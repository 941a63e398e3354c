"""An eps that is zero in float16."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.code_rule import CodeRule, replaced
from nanguard.check.code.half_precision import Halves
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Edit, Finding, Fix, Severity, name_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.values import Value

# The smallest float16 above zero, and half the step below one.
_SMALLEST = 5.96e-8
_STEP = 2.4e-4
_WITH_EPS = {"normalize": 1e-12, "cosine_similarity": 1e-8, "pairwise_distance": 1e-6}


class EpsTooSmallForHalf(CodeRule):
    """An eps below what float16 can hold, used on float16 tensors.

    *Why it breaks a run*: the smallest float16 above zero is 6e-8. An eps of 1e-8 added to it, or
    used as a lower bound, is exactly zero: the division or the logarithm it was to protect gives
    Inf or NaN at the first zero. In the same way `1 - 1e-6` is exactly 1.

    Use 1e-4 or so in float16, or do this part in float32 (`x.float()`).
    """

    code = "SRC006"
    name = "eps-too-small-for-half"
    severity = Severity.WARNING
    seen_in = "https://github.com/pytorch/pytorch/issues/32137"
    examples: ClassVar = (
        Fails(
            "import torch\n\n\ndef entropy(logits):\n    p = logits.half().softmax(-1)\n"
            "    return -(p * torch.log(p + 1e-8)).sum(-1)\n",
            line=6,
            fixed="import torch\n\n\ndef entropy(logits):\n    p = logits.half().softmax(-1)\n"
            "    return -(p * torch.log(p + 1e-4)).sum(-1)\n",
        ),
        Fails(
            "import torch\n\nEPS = 1e-12\n\n\ndef unit(x):\n    x = x.to(torch.float16)\n"
            "    return x / x.norm(dim=-1, keepdim=True).clamp(min=EPS)\n",
            line=8,
        ),
        Passes(
            "import torch\n\n\ndef entropy(logits):\n    p = logits.half().float().softmax(-1)\n"
            "    return -(p * torch.log(p + 1e-8)).sum(-1)\n"
        ),
        Passes(
            "import torch\n\n\ndef unit(x):\n    x = x.half()\n"
            "    return x / (x.norm(dim=-1, keepdim=True) + 1e-4)\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        halves = Halves.of(code)
        if not halves.possible:
            return
        for value in code.of("add", "clamp", "clamp_min", "maximum", "max", *_WITH_EPS):
            for eps, tensor in _small(value):
                if value.node is not None and halves.is_half(tensor):
                    number = name_of(eps.number() or 0.0)
                    message = f"{number} is lost in float16: it protects nothing here"
                    fix = Fix(
                        "use an eps of 1e-4, or compute this in float32", edits=_edits(code, eps)
                    )
                    yield self.at(code, value.node, message, fixes=(fix,))
                    break


def _small(value: Value) -> Iterator[tuple[Value, Value]]:
    """The constants of an operation that float16 loses, each with the tensor they are used on."""
    inputs = value.inputs
    if not inputs:
        return
    if value.op in _WITH_EPS:
        eps = value.keywords.get("eps")
        if eps is not None and _is_lost(eps):
            yield eps, inputs[0]
    elif value.op in ("clamp", "clamp_min"):
        for bound in (value.arg(1, "min"), value.arg(2, "max")):
            if bound is not None and (_is_lost(bound) or _is_one(bound)):
                yield bound, inputs[0]
    elif len(inputs) == 2:
        for eps, tensor in ((inputs[1], inputs[0]), (inputs[0], inputs[1])):
            if _is_lost(eps):
                yield eps, tensor


def _is_one(bound: Value) -> bool:
    number = bound.number()
    return number is not None and 0 < 1.0 - number < _STEP


def _is_lost(eps: Value) -> bool:
    number = eps.number()
    return number is not None and 0.0 < number < _SMALLEST


def _edits(code: Code, eps: Value) -> tuple[Edit, ...]:
    if isinstance(eps.node, ast.Constant) and _is_lost(eps) and not eps.name:
        return (replaced(code, eps.node, "1e-4"),)
    return ()
