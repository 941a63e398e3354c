"""Statistics of too little."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from nanguard.diagnose.cause import STATISTICS, Cause, Suspicion, bare
from nanguard.diagnose.repairs import Repair, bounded_divisor, call_with, edit, without_samples
from nanguard.source import floors
from nanguard.source.edits import called_name

if TYPE_CHECKING:
    from nanguard.diagnose.cause import Case
    from nanguard.replay.tracer.sites import Site
    from nanguard.source.edits import SourceFile


# The square of more than this is too large for float32, or soon will be.
_HUGE = 1e15


def _is_spread_by_hand(case: Case, name: str) -> bool:
    """Returns whether an input was made of differences from a mean."""
    places: dict[str, set[int]] = {"sub": set(), "mean": set()}
    for ancestor in case.ancestors(name, 9):
        if bare(ancestor.op) in places:
            places[bare(ancestor.op)].add(ancestor.distance)
    return any(distance + 1 in places["mean"] for distance in places["sub"])


class DegenerateStatistics(Cause):
    """The spread of one element, or of elements that are all the same."""

    code = "degenerate-statistics"
    meaning = "std, var or correlation of one element or of constant data"
    why = (
        "The standard deviation of constant data is 0, and that of a single element is NaN, as it "
        "divides by n - 1. Normalising by either breaks. Add an eps to the divisor, leave such "
        "groups as they are, or drop the last incomplete batch."
    )
    lower_rate_helps = False
    lies_in_samples = True

    def suspect(self, case: Case) -> Suspicion | None:
        """Returns whether a spread is zero or undefined."""
        if case.largest_input() > _HUGE:
            return None  # their squares are too large, whether they differ or not
        if case.op in STATISTICS:
            where = "the derivative of " if case.phase == "backward" else ""
            count = case.inputs[0].count if case.inputs else 0
            return Suspicion(
                0.9,
                f"{where}{case.op} over {count} value(s) that do not differ, or are only one",
                [{"what": f"input of {case.origin.op}", **s.to_json()} for s in case.inputs[:1]],
            )
        divisor = case.divisor()
        if divisor is None or case.phase in ("backward", "optimizer"):
            return None
        near = case.ancestor_ops(divisor.name, 5)
        spread = near & {"std", "var", "std_mean", "var_mean"}
        if not spread and not _is_spread_by_hand(case, divisor.name):
            return None
        return Suspicion(
            0.88 if spread else 0.83,
            f"{case.op} by a spread of 0: {divisor.zeros} of {divisor.count} "
            f"{'is' if divisor.zeros == 1 else 'are'} exactly 0",
            [{"what": f"divisor of {case.origin.op}", **divisor.to_json()}],
        )

    def repairs(self, case: Case) -> list[Repair]:
        """Keeps the spread away from zero."""
        found = bounded_divisor(case) if case.divisor() is not None else []

        def make(file: SourceFile, site: Site) -> str | None:
            call = file.node_at(site, lambda node: called_name(node) in ("std", "var"))
            if not isinstance(call, ast.Call):
                return None
            known = next((k for k in call.keywords if k.arg in ("unbiased", "correction")), None)
            name = "unbiased" if known is None or known.arg is None else known.arg
            value = "0" if name == "correction" else "False"
            bound = floors.DIVISOR if called_name(call) == "std" else floors.VARIANCE
            changed = call_with(file, call, name, value)
            return file.replaced([(call, f"{changed}.clamp(min={bound})")])

        if case.op in ("std", "var"):
            summary = "take the spread with unbiased=False and keep it away from zero"
            found += edit(case.origin.site, summary, make)
        return found + without_samples(case, "leave samples that do not vary as they are")
