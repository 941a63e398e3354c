"""exp of a large number."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.diagnosis.case import EXPONENTIALS
from nanguard.diagnosis.cause import Cause, Suspicion
from nanguard.diagnosis.repairs import Repair, bounded_operand, without_samples
from nanguard.findings import name_of

if TYPE_CHECKING:
    from nanguard.diagnosis.case import Case


class ExpOverflow(Cause):
    """exp(89) is more than float32 can hold."""

    code = "exp-overflow"
    meaning = "exp of a large finite number in float32"
    why = (
        "exp grows beyond float32 at 88.7. A log-variance, a log-ratio or a score that the network "
        "puts out has no bound of its own. Bound it before exp, subtract the maximum first, or "
        "stay in log space (logsumexp, log_softmax, softplus)."
    )

    def suspect(self, case: Case) -> Suspicion | None:
        """Returns whether exp made an infinity out of a finite number."""
        if case.op not in EXPONENTIALS or case.phase == "backward":
            return None
        stats = case.input("self")
        high = stats.high if stats is not None else float("nan")
        return Suspicion(
            0.86 if case.is_half else 0.92,
            f"{case.op}({name_of(high)}) is more than {case.precision} can hold",
            [] if stats is None else [{"what": f"input of {case.origin.op}", **stats.to_json()}],
        )

    def repairs(self, case: Case) -> list[Repair]:
        """Bounds the exponent."""
        bound = ".clamp(max=10)" if case.is_half else ".clamp(max=20)"
        return bounded_operand(
            case, EXPONENTIALS, bound, f"bound the exponent with {bound}"
        ) + without_samples(case, "look at the samples for which this happens")
