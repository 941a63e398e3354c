"""Numbers too large for a 16-bit type."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from nanguard.diagnosis.case import ARCS, HALF_MAX, LOGS
from nanguard.diagnosis.cause import Cause, Suspicion
from nanguard.diagnosis.repairs import Repair, numbers_on_line, replaced_text, without_samples

if TYPE_CHECKING:
    from nanguard.diagnosis.case import Case
    from nanguard.diagnosis.lab import Trial

_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d*)?(?:e[+-]?\d+)?", re.IGNORECASE)


class HalfPrecisionOverflow(Cause):
    """float16 ends at 65504."""

    code = "half-precision-overflow"
    meaning = "a magnitude beyond the range of a 16-bit type: activation, mask, cast or norm"
    why = (
        "float16 holds numbers up to 65504. Squares, sums, scores and constants like -1e9 are "
        "beyond that sooner than one thinks. Compute that part in float32, use bfloat16, which has "
        "the range of float32, or take the type's own minimum for masks."
    )

    def suspect(self, case: Case) -> Suspicion | None:
        """Returns whether finite numbers became infinite in a 16-bit type."""
        detail = case.origin.detail
        if detail is None or case.precision != "float16":
            return None  # bfloat16 has the range of float32
        constant = self._constant(case)
        if constant is not None:
            return Suspicion(0.93, f"{constant} does not fit into float16, it becomes -inf there")
        singular = case.divisor() is not None or case.op in (*LOGS, *ARCS)
        if detail.output.infs + detail.output.neg_infs == 0 or singular:
            return None
        evidence = [
            {"what": f"input {s.name} of {case.origin.kernel}", **s.to_json()} for s in case.inputs
        ]
        return Suspicion(
            0.88,
            f"{case.origin.kernel} goes beyond {HALF_MAX:g}, the largest {case.precision}: its "
            f"inputs reach {case.largest_input():.4g}",
            evidence,
        )

    def _constant(self, case: Case) -> str | None:
        detail = case.origin.detail
        scalars = detail.scalars.values() if detail else ()
        for value in scalars:
            if isinstance(value, (int, float)) and HALF_MAX < abs(value) < float("inf"):
                return f"{value:g}"
        sites = [*case.origin.literals, *([case.origin.site] if case.origin.site else [])]
        for site in sites:
            for found in _NUMBER.finditer(site.code):
                text: str = found.group()
                if HALF_MAX < abs(float(text)) < float("inf"):
                    return text
        return None

    def trials(self, case: Case) -> list[Trial]:
        """Computes in float32."""
        return [case.in_float32()]

    def repairs(self, case: Case) -> list[Repair]:
        """Takes a number or a type that fits."""
        found: list[Repair] = []
        for site in [*case.origin.literals, case.origin.site]:
            found += numbers_on_line(
                site,
                "use a mask constant that float16 can hold: 1e4",
                lambda value: value > HALF_MAX,
                "1e4",
            )
        if case.precision == "float16" and case.facts.made is not None:
            summary = "use bfloat16, which has the range of float32, instead of float16"
            if case.facts.autocast == "float16":
                found += replaced_text(
                    case.facts.made, summary, r"torch\.(float16|half)\b", "torch.bfloat16"
                )
            elif case.facts.half_parameters:
                found += replaced_text(case.facts.made, summary, r"\.half\(\)", ".bfloat16()")
        found.append(
            Repair(
                f"compute {case.op} in float32 (x.float(), or autocast(enabled=False) around it)",
                trial=case.in_float32(),
            )
        )
        return found + without_samples(case, "scale or clip such samples")
