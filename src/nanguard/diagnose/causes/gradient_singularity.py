"""A good value with an infinite derivative."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from nanguard.diagnose.cause import (
    ARCS,
    DIVISIONS,
    EXPONENTIALS,
    LOGS,
    ROOTS,
    STATISTICS,
    Cause,
    Suspicion,
)
from nanguard.diagnose.repairs import (
    Repair,
    bounded_divisor,
    bounded_operand,
    silencing,
    without_samples,
)
from nanguard.diagnose.rewrites import logs_without_probabilities
from nanguard.findings import name_of
from nanguard.source import floors

if TYPE_CHECKING:
    from nanguard.diagnose.cause import Case

# Beyond this, a product overflows and no derivative is to blame.
_HUGE = 1e15

# The gradient of their vectors divides by the differences of their values.
_DECOMPOSITIONS = ("_linalg_eigh", "_linalg_svd", "linalg_eig")
_WITHOUT_VECTORS = (
    "let no gradient go through its vectors: a Cholesky or QR decomposition needs no values that "
    "differ, and adding eps to the diagonal does not make them differ"
)


class GradientSingularity(Cause):
    """The derivative does not exist where the forward value does."""

    code = "gradient-singularity"
    meaning = "a usable forward value with an infinite or undefined derivative"
    why = (
        "sqrt at 0, acos at 1, a power below 1 at 0, the SVD of a matrix with equal singular "
        "values: the value is fine, its derivative is not. torch.where does not help, as the "
        "branch that is not chosen gets gradient 0, and 0 * inf is NaN. Keep the *argument* away "
        "from the singular point, inside of the function and before torch.where."
    )
    lies_in_samples = True

    def suspect(self, case: Case) -> Suspicion | None:
        """Returns whether backward made a bad value out of good ones."""
        if case.phase != "backward" or case.by_number_zero():
            return None
        if case.origin.hand_written and case.op in EXPONENTIALS:
            return None
        if case.in_hook and case.divisor() is not None:
            return None  # a division like any other
        if case.is_power_of_negative:
            return None  # the value is no number either, only nobody has used it
        bare = [abs(v) for s in case.inputs for v in (s.low, s.high) if not math.isnan(v)]
        if max(bare, default=0.0) > _HUGE:
            return Suspicion(0.3, f"the derivative of {case.op} is not finite")
        strength = 0.8 if case.op in STATISTICS else 0.86
        point = next((s for s in case.inputs if s.zeros and s.at_fault.count(0.0)), None)
        where = " at 0" if point is not None else ""
        if case.op in ARCS:
            where = " at 1 or -1"
        elif case.op.startswith("_linalg"):
            where = " where two of its values are the same"
        evidence = [
            {"what": f"input {s.name} of {case.origin.kernel} in backward", **s.to_json()}
            for s in case.inputs
        ]
        if case.origin.hand_written:
            faults = [value for s in case.inputs for value in s.at_fault]
            given = f" of {name_of(faults[0])}" if faults else ""
            does = f"takes {case.op}{given}"
            if case.op in DIVISIONS and len(case.inputs) > 1 and 0.0 in case.inputs[1].at_fault:
                does = f"divides{given.removeprefix(' of')} by 0"
            said = f"the backward that the script defines {does}"
            return Suspicion(strength, f"{said}, while its function's value is usable", evidence)
        return Suspicion(
            strength,
            f"the derivative of {case.op} is not finite{where}, while its value is usable",
            evidence,
        )

    def repairs(self, case: Case) -> list[Repair]:
        """Keeps the argument away from the singular point."""
        op, half = case.op, case.is_half
        found: list[Repair] = []
        if op in ("sqrt", "pow", "rsqrt", "linalg_vector_norm"):
            bound = f".clamp(min={floors.BASE if op == 'pow' else floors.square(half=half)})"
            found += bounded_operand(
                case, ("sqrt", "pow", "rsqrt"), bound, f"keep the argument above 0 with {bound}"
            )
        elif op in ARCS:
            bound = floors.cosine(half=half)
            found += bounded_operand(
                case, ARCS, bound, f"keep the argument inside of (-1, 1) with {bound}"
            )
        elif op in LOGS:
            bound = f".clamp(min={floors.probability(half=half)})"
            found += logs_without_probabilities(case) + bounded_operand(
                case, LOGS, bound, f"keep the argument above 0 with {bound}"
            )
        elif op in ("div", "reciprocal"):
            found += bounded_divisor(case)
        elif op in _DECOMPOSITIONS:
            found.append(Repair(_WITHOUT_VECTORS))
        given = case.inputs[0].at_fault if case.inputs else []
        if case.origin.hand_written and op in (*LOGS, *ROOTS) and min(given, default=0.0) < 0:
            found = silencing(found, "find out why the argument became negative")
        return found + without_samples(
            case, "leave out samples that lie on the singular point, or move them off it"
        )
