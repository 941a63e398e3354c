"""Data that was bad before torch saw it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from nanguard.diagnose.cause import Cause, Suspicion, bare
from nanguard.diagnose.repairs import Repair, without_samples
from nanguard.replay.tracer.op_kinds import LAYERS

if TYPE_CHECKING:
    from nanguard.diagnose.cause import Case
    from nanguard.diagnose.lab import Trial
    from nanguard.replay.tracer.op_records import Stats

_WRITES = ("fill", "index_put", "copy", "masked_fill", "full", "_to_copy", "lift_fresh")


class BadInputData(Cause):
    """NaN or Inf in features or targets."""

    code = "bad-input-data"
    meaning = "features or targets are already NaN or Inf when torch first sees them"
    why = (
        "A missing value, a failed conversion or a number too large for float32 came in with the "
        "data. One such value in a batch makes the loss, and then every weight, NaN. Find the "
        "sample, and decide about it where the data is read: drop it, mask it out of the loss, or "
        "repair it. Replacing NaN by 0 in the model hides the next one."
    )
    lower_rate_helps = False
    lies_in_samples = True

    def suspect(self, case: Case) -> Suspicion | None:
        """Returns whether the bad value came from outside, or was written as such."""
        if case.phase == "forward":
            return _given_to_a_layer(case)
        if case.phase != "data":
            return None
        detail = case.origin.detail
        if not _was_bad(case):
            # It was made of good data on the way in; that has a cause of its own.
            return Suspicion(0.3, f"{case.origin.op} made a bad value while data was prepared")
        if case.facts.unseen:
            # It may as well have been made bad by what the step did before.
            return Suspicion(0.5, "the data is not finite when the model's step first uses it")
        if detail is None:
            return Suspicion(0.9, "the data is not finite when torch first sees it")
        out = detail.output
        kinds = " and ".join(sorted(detail.kinds))
        when = "when torch first sees the data"
        site = case.origin.site
        if case.origin.by_numpy and site is not None:
            when = f"{when}: line {site.line} of {Path(site.file).name} makes them without torch"
        return Suspicion(
            0.95,
            f"{out.nonfinite} of {out.count} values are {kinds} {when}",
            [{"what": "the data as it came in", **out.to_json()}],
        )

    def trials(self, case: Case) -> list[Trial]:
        """Replaces the samples."""
        if case.phase == "data" and (case.facts.unseen or not _was_bad(case)):
            return []  # without a sample that an operation cannot take, any step is finite
        trial = case.without_samples()
        return [trial] if trial else []

    def repairs(self, case: Case) -> list[Repair]:
        """Leaves the samples out."""
        return without_samples(case, "drop or repair the data, or mask it out of the loss")


def _was_bad(case: Case) -> bool:
    """Returns whether the data was bad by itself, and not made so by an operation."""
    written = case.origin.op == "input" or bare(case.origin.op) in _WRITES
    return written and not _narrowed(case)


def _given_to_a_layer(case: Case) -> Suspicion | None:
    """Returns whether an infinity that somebody wrote into the data has reached a layer."""
    if case.origin.op not in LAYERS:
        return None
    for stats in case.inputs:
        written = stats.name in case.origin.came_with_data and not _is_added_mask(case, stats)
        if stats.nonfinite and written:
            return Suspicion(
                0.8,
                f"{case.op} is given {stats.nonfinite} of {stats.count} values that are not finite",
                [{"what": f"input {stats.name} of {case.origin.op}", **stats.to_json()}],
            )
    return None


def _is_added_mask(case: Case, stats: Stats) -> bool:
    """Returns whether infinities are those of a mask that was added: they are meant to be there."""
    if stats.neg_infs < stats.nonfinite:
        return False
    near = case.ancestors(stats.name)
    return any(bare(ancestor.op) == "add" and ancestor.low == -math.inf for ancestor in near)


def _narrowed(case: Case) -> bool:
    """Returns whether good data became bad when it was cast to a 16-bit type."""
    return case.is_half and bool(case.inputs) and not any(s.nonfinite for s in case.inputs)
