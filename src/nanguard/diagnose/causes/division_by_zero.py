"""Something divided by zero."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nanguard.diagnose.cause import Cause, Suspicion
from nanguard.diagnose.repairs import (
    Repair,
    bounded_divisor,
    bounded_operand,
    bounded_quotient,
    number_made_at,
    positive_number,
    silencing,
    wider_integers,
    without_samples,
)
from nanguard.source import floors

if TYPE_CHECKING:
    from nanguard.diagnose.cause import Case


# What divides by a norm that it computes itself.
_NORMALISE = ("_weight_norm", "_weight_norm_interface")


# Types of whole numbers that a count goes over the end of in no time.
_NARROW = ("uint8", "int8")


def _may_have_wrapped(case: Case) -> bool:
    """Returns whether a divisor of 8 bits is 0 although there is something to be divided."""
    divisor, detail = case.divisor(), case.origin.detail
    if divisor is None or detail is None or divisor.dtype not in _NARROW:
        return False
    return bool(detail.output.infs or detail.output.neg_infs)


class DivisionByZero(Cause):
    """A divisor that is zero, or a negative power of zero."""

    code = "division-by-zero"
    meaning = "0/0 or x/0, or a negative power of 0, in model, loss or weighting"
    why = (
        "A count, a mask's sum, a norm or a degree was zero for this batch. Bound the divisor from "
        "below (by 1 for a count, by a small number for a norm), or leave such rows out."
    )
    lower_rate_helps = False
    lies_in_samples = True

    def suspect(self, case: Case) -> Suspicion | None:
        """Returns whether the divisor is zero where the result is bad."""
        if case.by_number_zero() and case.phase != "init":
            # In backward it is the same number: dividing by it gave an infinity before.
            strength = 0.87 if case.phase == "backward" else 0.85
            source = number_made_at(case)
            where = "the script" if source is None else f"{Path(source.file).name}:{source.line}"
            return Suspicion(strength, f"{case.op} by the number 0, which {where} has computed")
        if case.op in _NORMALISE and not any(stats.nonfinite for stats in case.inputs):
            return Suspicion(0.75, f"{case.op} divides by the norm of a weight, which is 0")
        divisor = case.divisor()
        derived = case.phase == "backward" and not case.in_hook
        if divisor is None or derived or case.phase == "init":
            return None
        strength = 0.6 if case.phase == "optimizer" else 0.8
        return Suspicion(
            strength,
            f"{case.op} by zero: {divisor.zeros} of {divisor.count} divisors "
            f"{'is' if divisor.zeros == 1 else 'are'} exactly 0" + case.made_of(),
            [{"what": f"divisor of {case.origin.op}", **divisor.to_json()}],
        )

    def repairs(self, case: Case) -> list[Repair]:
        """Bounds the divisor, or what it gave."""
        if case.by_number_zero():
            return positive_number(case)
        if case.origin.wrapped is not None:
            bounded = silencing(bounded_divisor(case), "the number is wrong, not only too small")
            return wider_integers(case) + bounded
        if _may_have_wrapped(case):
            narrow = "an 8-bit count of 0, with something to divide, has gone over its end"
            wider = Repair("keep this count in int64 where it is made: 8 bits end at 127 or 255")
            return [wider, *silencing(bounded_divisor(case), narrow)]
        found = bounded_divisor(case) + bounded_quotient(case)
        if case.op in ("pow", "rsqrt"):
            divisor = case.divisor()
            count = divisor is not None and divisor.whole
            rooted = floors.square(half=case.is_half)
            small = floors.COUNT if count else rooted if case.op == "rsqrt" else floors.BASE
            bound = f".clamp(min={small})"
            found += bounded_operand(
                case, ("pow", "rsqrt"), bound, f"keep the base away from zero with {bound}"
            )
        return found + without_samples(case, "leave out samples for which the divisor is zero")
