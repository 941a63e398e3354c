"""Training that runs away."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.diagnosis.case import CASTS, DIVISIONS, EXPONENTIALS, LARGEST, STATISTICS
from nanguard.diagnosis.cause import Cause, Suspicion
from nanguard.diagnosis.repairs import Repair, clipped_gradients
from nanguard.findings import name_of

if TYPE_CHECKING:
    from nanguard.diagnosis.case import Case
    from nanguard.diagnosis.lab import Trial

_HUGE = 1e9
# The extremes of the wide types: no number grows to just these.
_EXTREMES = (LARGEST["bfloat16"], 3.4028234663852886e38)


class ExplodingOptimization(Cause):
    """Divergence: learning rate, gradients without clipping, inputs without scaling."""

    code = "exploding-optimization"
    meaning = "divergence through learning rate, unclipped gradients or unscaled inputs"
    why = (
        "Weights, activations or gradients grew from step to step until float32 could not hold "
        "them. Lower the learning rate, warm it up, clip gradients, and scale inputs and targets "
        "to about 1."
    )

    def suspect(self, case: Case) -> Suspicion | None:
        """Returns whether large finite numbers became infinite in a type with a wide range."""
        if case.precision == "float16" or case.phase in ("data", "init"):
            return None
        if _is_mask(case):
            return None
        large = case.largest_input()
        growth = case.facts.growth
        grown = growth is not None and growth.last > 10 * max(growth.first, 1e-12)
        singular = case.op in (*DIVISIONS, *EXPONENTIALS, *STATISTICS)
        if large < _HUGE and not grown:
            return None
        evidence = [
            {"what": f"input {s.name} of {case.origin.kernel}", **s.to_json()} for s in case.inputs
        ]
        if growth is not None:
            evidence.append(
                {"what": "norm of all parameters", "first": growth.first, "last": growth.last}
            )
        if case.facts.losses:
            evidence.append({"what": "losses before", "last": case.facts.losses[-5:]})
        strength = (0.75 if grown else 0.7) if large >= _HUGE else 0.4
        return Suspicion(
            strength * (0.6 if singular else 1.0),
            f"{case.origin.kernel} overflows {case.precision}: its inputs have grown to "
            f"{name_of(large)}",
            evidence,
        )

    def trials(self, case: Case) -> list[Trial]:
        """Goes more slowly."""
        found = [case.lab.try_out("gradients clipped to norm 1 in every step", clip=1.0)]
        if case.facts.lr is not None:
            found.append(case.lab.try_out("a learning rate ten times lower", lr_factor=0.1))
        return found

    def repairs(self, case: Case) -> list[Repair]:
        """Clips, and lowers the learning rate."""
        found = clipped_gradients(case)
        if case.facts.lr is not None:
            lower = case.lab.try_out("a learning rate ten times lower", lr_factor=0.1)
            rate = name_of(case.facts.lr)
            found.append(
                Repair(f"lower the learning rate ({rate}) by a factor of ten", trial=lower)
            )
        return found


def _is_mask(case: Case) -> bool:
    """Returns whether large numbers were written, as in a mask, and did not come by training."""
    if not case.inputs or case.from_parameters:
        return False
    return case.op in CASTS or case.largest_input() in _EXTREMES
