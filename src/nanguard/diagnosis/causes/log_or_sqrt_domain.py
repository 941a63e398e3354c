"""A function outside of where it is defined."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.diagnosis.case import ARCS, LOGS, ROOTS
from nanguard.diagnosis.cause import Cause, Suspicion
from nanguard.diagnosis.repairs import Repair, bounded_operand, without_samples
from nanguard.diagnosis.rewrites import log_softmax
from nanguard.findings import name_of

if TYPE_CHECKING:
    from nanguard.diagnosis.case import Case
    from nanguard.tracer.records import Stats


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

    def suspect(self, case: Case) -> Suspicion | None:
        """Returns whether the argument is outside of the domain."""
        if case.phase not in ("forward", "data"):
            return None
        if case.op not in (*LOGS, *ROOTS, *ARCS) or case.divisor() is not None:
            return None
        stats = self._argument(case)
        if stats is None:
            return None
        value = name_of(stats.at_fault[0]) if stats.at_fault else name_of(stats.low)
        number = case.origin.detail.all_bad if case.origin.detail else 0
        return Suspicion(
            0.78,
            f"{case.op}({value}): {number} of {stats.count} elements are outside of its domain",
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
        same = log_softmax(case) if case.op == "log" else []
        small = "1e-6" if case.is_half else "1e-8"
        bound = f".clamp(min={small})"
        if case.op == "log1p":
            bound = ".clamp(min=-1 + 1e-6)"
        elif case.op in ARCS:
            bound = ".clamp(-1 + 1e-6, 1 - 1e-6)"
        names = (case.op, "pow") if case.op in ROOTS else (case.op, "log")
        cut = bounded_operand(case, names, bound, f"keep the argument in its domain with {bound}")
        return same + cut + without_samples(case, "look at the samples for which this happens")
