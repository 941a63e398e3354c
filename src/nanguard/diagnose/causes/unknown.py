"""Nobody knows, and nobody guesses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.diagnose.cause import Cause

if TYPE_CHECKING:
    from nanguard.diagnose.cause import Case, Suspicion


class Unknown(Cause):
    """What is left when no cause was found."""

    code = "unknown"
    meaning = "no cause was found; the incident holds the evidence"
    why = (
        "The step could not be replayed, or nothing that is known to break a step was found where "
        "the first bad value appeared. The incident shows the place and the numbers as far as they "
        "are known. Run the command again, or look at every operation of the step with nanguard "
        "replay --trace-all."
    )

    def suspect(self, case: Case) -> Suspicion | None:
        """Returns nothing: this is what is left."""
        return None
