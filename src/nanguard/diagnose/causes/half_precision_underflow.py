"""Numbers too small for a 16-bit type."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.diagnose.cause import Cause, Suspicion
from nanguard.diagnose.repairs import Repair, numbers_on_line, replaced_text, with_keyword
from nanguard.findings import name_of

if TYPE_CHECKING:
    from nanguard.diagnose.cause import Case
    from nanguard.diagnose.lab import Trial

_SMALLEST = 6e-8


class HalfPrecisionUnderflow(Cause):
    """float16 knows nothing between 0 and 6e-8."""

    code = "half-precision-underflow"
    meaning = "an eps or a second moment rounds to 0 in a 16-bit type"
    why = (
        "The smallest number above 0 in float16 is 6e-8, and next to 1 it loses everything below "
        "1e-3. An eps of 1e-8 is 0 there, and the division or the log it should protect is not "
        "protected. Use a larger eps (1e-4), keep optimizer state and norms in float32, or use "
        "bfloat16."
    )
    lower_rate_helps = False

    def suspect(self, case: Case) -> Suspicion | None:
        """Returns whether a zero in a 16-bit type is at fault."""
        if not case.is_half and not (case.facts.half_parameters and case.phase == "optimizer"):
            return None
        zeros = [s for s in case.inputs if s.zeros and (s.is_half or case.phase == "optimizer")]
        detail = case.origin.detail
        overflow = detail is not None and case.largest_input() > 1e3
        if not zeros or overflow:
            return None
        if case.phase == "optimizer":
            eps = "" if case.facts.eps is None else f" (eps {name_of(case.facts.eps)})"
            return Suspicion(
                0.9,
                f"{case.facts.optimizer}{eps} divides 0 by 0: its eps is 0 in {case.precision}",
                [{"what": f"input {s.name} of {case.origin.op}", **s.to_json()} for s in zeros],
            )
        return Suspicion(
            0.82,
            f"{case.op} meets an exact 0 in {case.precision}, where small numbers are lost",
            [{"what": f"input {s.name} of {case.origin.op}", **s.to_json()} for s in zeros],
        )

    def trials(self, case: Case) -> list[Trial]:
        """Computes in float32."""
        return [case.in_float32()]

    def repairs(self, case: Case) -> list[Repair]:
        """Takes an eps that is not lost."""
        found: list[Repair] = []
        if case.phase == "optimizer":
            found += with_keyword(
                case.facts.made, "eps", "1e-4", "give the optimizer an eps that float16 can hold"
            )
        sites = [case.origin.site]
        for stats in case.inputs:
            sites += [a.site for a in case.ancestors(stats.name, 6)]
        seen: set[int] = set()
        for site in sites:
            if site is not None and site.line not in seen:
                seen.add(site.line)
                found += numbers_on_line(
                    site,
                    "use an eps that float16 can hold: 1e-4",
                    lambda value: 0 < value < _SMALLEST,
                    "1e-4",
                )
        if case.facts.half_parameters and case.precision == "float16":
            found += replaced_text(
                case.facts.made,
                "use bfloat16, which has the range of float32, instead of float16",
                r"\.half\(\)",
                ".bfloat16()",
            )
        found.append(Repair(f"compute {case.op} in float32", trial=case.in_float32()))
        return found
