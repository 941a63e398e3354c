"""A power between 0 and 1 of something that can be 0."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.code_rule import CodeRule, bare, operand, replaced
from nanguard.check.code.training_path import is_beside_training
from nanguard.check.code.value_questions import can_be_zero, guarded_by, is_learned, is_number
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Finding, Fix, Severity
from nanguard.source import floors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.scopes import Function
    from nanguard.check.code.values import Value

# Numbers of a noise schedule: positive by construction, and nothing is differentiated.
_SCHEDULE = re.compile(r"alpha|beta|sigma|snr|var")


_TABLES = frozenset({"tensor", "as_tensor", "Tensor", "FloatTensor"})


class FractionalPowerGradient(CodeRule):
    """`pow` with an exponent between 0 and 1 of a value that can be 0.

    *Why it breaks a run*: the derivative of x**a at 0 is infinite for 0 < a < 1. Clamping x to
    [0, 1] before it does not help: the clamp is where the zeros come from.

    Keep the base away from 0: `x.clamp(min=1e-6).pow(a)`, or add an eps before the power.
    """

    code = "SRC021"
    name = "fractional-power-gradient"
    severity = Severity.WARNING
    claim = "value"
    seen_in = "https://github.com/tensorflow/tensorflow/issues/2295"
    examples: ClassVar = (
        Fails(
            "import torch\n\n\ndef srgb(x):\n    x = x.clamp(0.0, 1.0)\n"
            "    return 1.055 * x.pow(1 / 2.4) - 0.055\n",
            line=6,
            fixed="import torch\n\n\ndef srgb(x):\n    x = x.clamp(0.0, 1.0)\n"
            "    return 1.055 * x.clamp(min=1e-6).pow(1 / 2.4) - 0.055\n",
        ),
        Fails("import torch\n\n\ndef f(x, a=0.45):\n    return (x**2) ** a\n", line=5),
        Passes("import torch\n\n\ndef f(x):\n    return (x**2 + 1e-6).pow(0.45)\n"),
        Passes("import torch\n\n\ndef lr(step, n):\n    return 0.1 * (1 - step / n) ** 0.9\n"),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        yield from self._of_negatives(code)
        for power in code.of("pow"):
            exponent = power.arg(1, "exponent")
            number = None if exponent is None else exponent.number()
            if not power.grad or number is None or not 0 < number < 1:
                continue
            base = power.inputs[0]
            if (
                not _is_tensor(
                    base,
                    number,
                    power.scope,
                    by_torch=not isinstance(power.node, ast.BinOp) or is_learned(code, base),
                )
                or base.has("size", "norm")
                or is_number(base)
            ):
                continue
            if not can_be_zero(base):
                continue
            if (number == 0.5 and base.has("sumsq", "var")) or guarded_by(base, power.guards):
                continue
            node = operand(power)
            bound = f".clamp(min={floors.BASE})"
            edits = (replaced(code, node, f"{bare(code, node)}{bound}"),) if node else ()
            yield self.at(
                code,
                power.node,
                f"power {number:.3g} of a value that can be 0: its gradient there is infinite",
                fixes=(Fix("keep the base away from 0", edits=edits),),
                shown=(base.lo == 0 and base.core.op in ("clamp", "clamp_min", "relu"))
                or (_is_what_is_missing(base) and is_learned(code, base)),
                weak=is_beside_training(code, power) or _is_of_a_spectrum(base),
            )

    def _of_negatives(self, code: Code) -> Iterator[Finding]:
        """Powers of what can be negative, whose exponents are a table of fractions: NaN."""
        for power in code.of("pow"):
            exponent = power.arg(1, "exponent")
            table = exponent.core if exponent is not None and power.grad else None
            items = table.items or () if table is not None else ()
            if table is not None and not items and table.op in _TABLES and table.inputs:
                items = table.inputs[0].items or ()
            numbers = [item.number() for item in items]
            if not numbers or not all(n is not None and 0 < n < 1 for n in numbers):
                continue
            base = power.inputs[0]
            if base.lo >= 0 or base.has("padded") or guarded_by(base, power.guards):
                continue
            yield self.at(
                code,
                power.node,
                "fractional powers of what can be negative are NaN there",
                fixes=(Fix("keep the base above 0: relu, or .clamp(min=1e-6)"),),
                shown=True,
                weak=is_beside_training(code, power),
            )


def _is_what_is_missing(base: Value) -> bool:
    """Returns whether it is 1 minus a share or a cosine, which is 0 where all is well."""
    core = base.core
    return core.op == "sub" and len(core.inputs) > 1 and core.inputs[0].number() == 1


def _is_of_a_spectrum(base: Value) -> bool:
    """Returns whether it is the magnitude of a spectrum, which is as a rule that of the input."""
    return any(part.op in ("complex", "stft", "view_as_complex") for part in base.upstream(8))


def _is_tensor(base: Value, exponent: float, scope: Function | None, *, by_torch: bool) -> bool:
    """Returns whether a base is a tensor that reaches 0, and not a size or a rate."""
    core = base.core
    if core.op == "sub" and by_torch and exponent != 0.5 and core.inputs[0].number() == 1:
        return True
    if base.lo == 0:
        if exponent == 0.5:
            here = core.scope is scope
            return here and core.op in ("clamp", "relu", "abs", "softmax", "sigmoid")
        return core.op not in ("", "join")
    if core.op != "" or core.const is not None or base.lo > 0:
        return False
    if exponent == 0.5 and _SCHEDULE.search(core.name.lower()):
        return False
    return core.has("tensor") or (exponent != 0.5 and core.has("magnitude"))
