"""How large the loss of a run is in its good steps."""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nanguard.diagnose.lab import Trial

_LAST = 20
# A finite loss that is so many times the usual one: the step would ruin the weights all the same.
_FAR = 100.0
# The largest loss of good steps may be exceeded by so much: losses of several kinds take turns.
_ABOVE_LARGEST = 10.0
# A loss below this ruins nothing: one that is a mean of signed numbers is usually about 0.
_HARMLESS = 10.0
# Nobody trains with a loss beyond this; all there is to go by before the first good step.
_SANE = 1e8
# One outlier may make the true loss that much larger.
_MORE_IF_EXACT = 100.0


class Usual:
    """What is usual for the loss, from the steps before a bad one.

    Attributes:
        loss: The size of the usual loss; infinite if nothing is known about it.
    """

    def __init__(self, losses: Sequence[float]) -> None:
        calm = [abs(loss) for loss in losses[-_LAST:] if loss and math.isfinite(loss)]
        # A run that diverges shows it before it comes to infinity: these steps were no good ones.
        while len(calm) > 1 and calm[-1] > _FAR * median(calm[:-1]):
            calm.pop()
        self.loss = median(calm) if calm else math.inf
        largest = max(calm, default=math.inf)
        self._limit = max(_FAR * self.loss, _ABOVE_LARGEST * largest, _HARMLESS)
        if not calm:
            self._limit = _SANE

    def is_far_from(self, trial: Trial, *, exact: bool = False) -> bool:
        """Returns whether a step that is finite has a loss far above what is usual.

        Args:
            trial: What was tried.
            exact: Whether the change computes the same, so that the loss was that large before.
        """
        limit = self._limit * (_MORE_IF_EXACT if exact else 1.0)
        return bool(trial.finite) and trial.loss is not None and abs(trial.loss) > limit

    def allows(self, trial: Trial | None, *, exact: bool = False) -> bool:
        """Returns whether a trial made the step a good one: finite, and not far off."""
        return trial is not None and bool(trial.finite) and not self.is_far_from(trial, exact=exact)
