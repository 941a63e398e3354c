"""A function outside of where it is defined."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.diagnose.cause import ARCS, LOGS, ROOTS, Cause, Suspicion
from nanguard.diagnose.repairs import (
    Repair,
    bounded_operand,
    finite_masks,
    silencing,
    wider_integers,
    without_samples,
)
from nanguard.diagnose.rewrites import logs_without_probabilities
from nanguard.findings import name_of
from nanguard.source import floors

if TYPE_CHECKING:
    from nanguard.diagnose.cause import Case
    from nanguard.replay.tracer.op_records import Stats


# What is this far below zero did not get there by rounding.
_FAR = 1e-3


class LogOrSqrtDomain(Cause):
    """log(0), sqrt of a negative number, a fractional power of one."""

    code = "log-or-sqrt-domain"
    meaning = "log(x <= 0), a fractional power of a negative number, or 0 * log 0"
    why = (
        "The argument left the domain of the function: a probability that became exactly 0, a "
        "difference that became negative by rounding, a prediction without a lower bound. Use the "
        "form that cannot leave it (log_softmax, logsigmoid, torch.special.entr, log1p), or bound "
        "the argument."
    )
    lies_in_samples = True

    def suspect(self, case: Case) -> Suspicion | None:
        """Returns whether the argument is outside of the domain."""
        if case.phase not in ("forward", "data") and not case.is_power_of_negative:
            return None
        if case.is_zero_log_zero:
            return Suspicion(
                0.78,
                "0 * log 0: what is masked with -inf has the probability 0 and the logarithm -inf",
                [
                    {"what": f"input {stats.name} of {case.origin.op}", **stats.to_json()}
                    for stats in case.inputs
                ],
            )
        if case.op not in (*LOGS, *ROOTS, *ARCS) or case.divisor() is not None:
            return None
        stats = self._argument(case)
        if stats is None:
            return None
        value = name_of(stats.at_fault[0]) if stats.at_fault else name_of(stats.low)
        number = case.origin.detail.all_bad if case.origin.detail else 0
        return Suspicion(
            0.78,
            f"{case.op}({value}): {number} of {stats.count} elements are outside of its domain"
            + case.made_of(),
            [{"what": f"input of {case.origin.op}", **stats.to_json()}],
        )

    def _argument(self, case: Case) -> Stats | None:
        stats = case.input("other") if case.op == "xlogy" else case.input("self")
        if stats is None or stats.count == 0:
            return None
        exponent = case.origin.detail.scalars.get("exponent") if case.origin.detail else None
        if isinstance(exponent, (int, float)) and float(exponent).is_integer():
            return None  # defined for every base
        outside = stats.negatives > 0 or (case.op in LOGS and stats.zeros > 0)
        outside = outside or (case.op in ARCS and max(abs(stats.low), abs(stats.high)) >= 1)
        return stats if outside else None

    def repairs(self, case: Case) -> list[Repair]:
        """Takes the form that cannot leave the domain, or bounds the argument."""
        if case.is_zero_log_zero:
            return finite_masks(case) + without_samples(case, "leave out what is masked")
        half = case.is_half
        small = floors.probability(half=half) if case.op in LOGS else floors.square(half=half)
        bound = f".clamp(min={small})"
        if case.op == "log1p":
            bound = f".clamp(min=-1 + {floors.probability(half=half)})"
        elif case.op in ARCS:
            bound = floors.cosine(half=half)
        elif case.op in ("pow", "float_power"):
            bound = f".clamp(min={floors.BASE})"
        names = (case.op, "pow") if case.op in ROOTS else (case.op, "log")
        cut = bounded_operand(case, names, bound, f"keep the argument in its domain with {bound}")
        if case.origin.wrapped is not None:
            cut = silencing(cut, "the number is wrong, not only out of range")
            return wider_integers(case) + cut
        stats = self._argument(case)
        if stats is not None and case.op not in ARCS and min(stats.at_fault, default=0.0) < -_FAR:
            cut = silencing(cut, "find out why the argument became negative")
        same = logs_without_probabilities(case) if case.op in LOGS else []
        return same + cut + without_samples(case, "look at the samples for which this happens")
