"""``acos`` of a value that can be exactly 1 or -1."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.code_rule import CodeRule, bare, operand, replaced
from nanguard.check.code.training_path import is_beside_training
from nanguard.check.code.value_questions import carries_gradient, guarded_by
from nanguard.check.code.values import INF
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Edit, Finding, Fix, Severity
from nanguard.source import floors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.values import Value


# What a cosine is made by where no clamp follows: a product, a trace, a quotient.
_COMPUTED = frozenset({"matmul", "einsum", "sum", "div", "bmm", "linear", "sub", "add", "mul"})


class AcosAtBoundary(CodeRule):
    """`acos`, `asin`, `acosh` or `atanh` of a value that reaches the end of their range.

    *Why it breaks a run*: the derivative of acos is infinite at ±1. A clamp to [-1, 1] keeps the
    value in the domain and puts every pair of parallel vectors on the very points where the
    gradient does not exist. Without a clamp rounding takes a cosine above 1, where acos is NaN.

    Clamp to `-1 + eps, 1 - eps` (eps of 1e-6 in float32), or compute the angle with `atan2` of
    sine and cosine.
    """

    code = "SRC022"
    name = "acos-at-boundary"
    severity = Severity.WARNING
    claim = "value"
    seen_in = "https://github.com/pytorch/pytorch/issues/8069"
    examples: ClassVar = (
        Fails("import torch\n\n\ndef f(c):\n    return torch.acos(c.clamp(-1.0, 1.0))\n", line=5),
        Fails(
            "import torch\nimport torch.nn.functional as F\n\n\ndef f(a, b):\n"
            "    cos = F.cosine_similarity(a, b, dim=-1)\n    return torch.arccos(cos)\n",
            line=7,
            fixed="import torch\nimport torch.nn.functional as F\n\n\ndef f(a, b):\n"
            "    cos = F.cosine_similarity(a, b, dim=-1)\n"
            "    return torch.arccos(cos.clamp(-1 + 1e-6, 1 - 1e-6))\n",
        ),
        Passes(
            "import torch\n\n\ndef f(c):\n    return torch.acos(c.clamp(-1 + 1e-6, 1 - 1e-6))\n"
        ),
        Passes(
            "import torch\n\n\ndef f(c, eps):\n    return torch.acos(c.clamp(-1 + eps, 1 - eps))\n"
        ),
        Passes("import torch\n\n\ndef f(s, c):\n    return torch.atan2(s, c)\n"),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        for angle in code.of("acos", "asin", "acosh", "atanh"):
            value = angle.inputs[0] if angle.inputs else None
            if value is None or not angle.grad or guarded_by(value, angle.guards):
                continue
            if not _ENDS.get(angle.op, _reaches_one)(value):
                continue
            if not carries_gradient(value):
                continue
            yield self.at(
                code,
                angle.node,
                f"{angle.op} of a value that can be exactly 1"
                f"{'' if angle.op == 'acosh' else ' or -1'}, where its gradient is infinite",
                fixes=(_fix(code, angle),),
                shown=True,
                weak=is_beside_training(code, angle),
            )


def _is_one_at_rest(value: Value) -> bool:
    """Returns whether it is 1 and something that is 0 for two equal points."""
    core = value.core
    if core.op in ("clamp", "clamp_min", "maximum"):
        return value.lo == 1.0
    if core.op != "add" or len(core.inputs) < 2:
        return False
    ones = [part.number() for part in core.inputs[:2]]
    rest = core.inputs[1] if ones[0] == 1 else core.inputs[0]
    return 1 in ones and rest.lo == 0 and not rest.has("padded", "bounded-below")


def _is_one_or_more(value: Value) -> bool:
    """Returns whether it is a length, or what a tanh rounds to 1."""
    if value.hi < 1.0:
        return False
    return value.core.op == "tanh" or value.has("norm") or value.hi == 1.0 == -value.lo


_ENDS = {"acosh": _is_one_at_rest, "atanh": _is_one_or_more}


def _fix(code: Code, angle: Value) -> Fix:
    if angle.op == "acosh":
        return Fix("bound it from below: clamp(min=1 + 1e-6)")
    return Fix("stay away from ±1, or use atan2", edits=_edits(code, angle))


def _edits(code: Code, angle: Value) -> tuple[Edit, ...]:
    node = operand(angle)
    if node is None:
        return ()
    return (replaced(code, node, f"{bare(code, node)}{floors.cosine()}"),)


def _reaches_one(value: Value) -> bool:
    core = value.core
    if value.lo == -INF and value.hi == INF and core.op in _COMPUTED:
        return True  # nothing keeps it between -1 and 1, where rounding takes a cosine out
    if core.op in (
        "clamp",
        "clamp_min",
        "clamp_max",
        "minimum",
        "maximum",
        "min",
        "max",
        "hardtanh",
    ):
        return value.hi == 1.0 or value.lo == -1.0
    return core.has("cosine")
