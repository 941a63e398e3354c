"""exp of a large number."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from nanguard.diagnose.cause import EXPONENTIALS, Cause, Suspicion
from nanguard.diagnose.lab import Usual
from nanguard.diagnose.repairs import Repair, bounded_operand, silencing, without_samples
from nanguard.diagnose.rewrites import shifted_by_largest, shifted_exp
from nanguard.findings import name_of

if TYPE_CHECKING:
    from nanguard.diagnose.cause import Case

# Bounds for an exponent: the first that is above those that gave something finite is taken.
_BOUNDS, _BOUNDS_HALF = (20, 40, 80), (10,)
_CLOSE_BOUND = 5
# Steps in which training has brought nothing anywhere yet.
_EARLY = 20


def _has_drifted(case: Case) -> bool:
    """Returns whether what training has learned is too large, and not one sample."""
    return case.from_parameters and not case.facts.samples and case.outcome.step > _EARLY


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
        if case.op not in EXPONENTIALS:
            return None
        if case.phase == "backward" and not case.origin.hand_written:
            return None
        stats = case.input("self")
        high = stats.high if stats is not None else float("nan")
        return Suspicion(
            0.86 if case.is_half else 0.92,
            f"{case.op}({name_of(high)}) is more than {case.precision} can hold",
            [] if stats is None else [{"what": f"input of {case.origin.op}", **stats.to_json()}],
        )

    def repairs(self, case: Case) -> list[Repair]:
        """Subtracts the maximum where that changes nothing, or bounds the exponent."""
        same = (shifted_exp(case) or shifted_by_largest(case)) if case.op == "exp" else []
        return (
            same
            + self._bounded(case)
            + without_samples(case, "look at the samples for which this happens")
        )

    def _bounded(self, case: Case) -> list[Repair]:
        """Bounds the exponent, and more closely where one element still decides the step."""
        detail = case.origin.detail
        good = math.log(detail.output.high) if detail and detail.output.high > 0 else 0.0
        usual = Usual(case.facts.losses)
        found: list[Repair] = []
        bounds = _BOUNDS_HALF if case.is_half else _BOUNDS
        wide = next((bound for bound in bounds if bound > good), bounds[0])
        for bound in (wide, _CLOSE_BOUND) if good < _CLOSE_BOUND else (wide,):
            call = f".clamp(max={bound})"
            made = bounded_operand(case, EXPONENTIALS, call, f"bound the exponent with {call}")
            if _has_drifted(case):
                made = silencing(made, "training has brought it there; bound what learns it")
            for repair in made:
                if repair.source is not None:
                    path, text = repair.source
                    repair.trial = case.lab.try_out(repair.summary, source={path: text})
            found += made
            if not any(r.trial is not None and usual.is_far_from(r.trial) for r in made):
                break
        return found
