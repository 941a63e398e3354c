"""A fault that does not come again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.diagnose.cause import Cause

if TYPE_CHECKING:
    from nanguard.diagnose.cause import Case, Suspicion


class HardwareOrNondeterminism(Cause):
    """The same step, repeated unchanged, is finite."""

    code = "hardware-or-nondeterminism"
    meaning = "the same step, from the same state, does not come out the same: hardware, or timing"
    why = (
        "What the same program makes of the same numbers should be the same. When it is not, "
        "suspect a race (non-blocking copies, threads), an operation that is not deterministic, "
        "memory that was never filled, or the hardware: run the step on another device, and look "
        "at its error counters."
    )

    def suspect(self, case: Case) -> Suspicion | None:
        """Returns nothing: a case is about a step that was bad again."""
        return None
