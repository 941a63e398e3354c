"""Something divided by zero."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.diagnosis.cause import Cause, Suspicion
from nanguard.diagnosis.repairs import (
    Repair,
    bounded_divisor,
    bounded_operand,
    bounded_quotient,
    positive_number,
    without_samples,
)

if TYPE_CHECKING:
    from nanguard.diagnosis.case import Case


# What divides by a norm that it computes itself.
_NORMALISE = ("_weight_norm", "_weight_norm_interface")


class DivisionByZero(Cause):
    """A divisor that is zero, or a negative power of zero."""

    code = "division-by-zero"
    meaning = "0/0 or x/0, or a negative power of 0, in model, loss or weighting"
    why = (
        "A count, a mask's sum, a norm or a degree was zero for this batch. Bound the divisor from "
        "below (by 1 for a count, by a small number for a norm), or leave such rows out."
    )

    def suspect(self, case: Case) -> Suspicion | None:
        """Returns whether the divisor is zero where the result is bad."""
        if case.by_number_zero() and case.phase not in ("backward", "init"):
            return Suspicion(0.85, f"{case.op} by the number 0, which the script has computed")
        if case.op in _NORMALISE and not any(stats.nonfinite for stats in case.inputs):
            return Suspicion(0.75, f"{case.op} divides by the norm of a weight, which is 0")
        divisor = case.divisor()
        if divisor is None or case.phase in ("backward", "init"):
            return None
        strength = 0.6 if case.phase == "optimizer" else 0.8
        return Suspicion(
            strength,
            f"{case.op} by zero: {divisor.zeros} of {divisor.count} divisors are exactly 0",
            [{"what": f"divisor of {case.origin.op}", **divisor.to_json()}],
        )

    def repairs(self, case: Case) -> list[Repair]:
        """Bounds the divisor, or what it gave."""
        if case.by_number_zero():
            return positive_number(case)
        found = bounded_divisor(case) + bounded_quotient(case)
        if case.op in ("pow", "rsqrt"):
            divisor = case.divisor()
            count = divisor is not None and divisor.whole
            bound = ".clamp(min=1)" if count else ".clamp(min=1e-8)"
            found += bounded_operand(
                case, ("pow", "rsqrt"), bound, f"keep the base away from zero with {bound}"
            )
        return found + without_samples(case, "leave out samples for which the divisor is zero")
