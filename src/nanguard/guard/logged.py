"""The mean loss that a framework logs, without the steps that did not count."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanguard.guard.driven import Driven

SKIPPED = "nanguard_skipped"


class LoggedLoss:
    """Corrects means into which a loss that is not finite went as 0.

    A mean over n steps, k of which had no finite loss, is the sum of the others divided by n. It
    is to be divided by n - k, and it is to be said how many steps were skipped.

    Args:
        driven: Knows the steps that were bad.
        step: The framework's count of steps so far.
    """

    def __init__(self, driven: Driven, step: int) -> None:
        self._driven = driven
        self._first = self._last = step
        self._lost = self._skipped = 0.0

    def correct(self, logs: dict[str, Any], step: int) -> None:
        """Corrects what is about to be logged, in place.

        Args:
            logs: The numbers; those called ``loss`` (since the last time) and ``train_loss``
                (since the beginning) are corrected.
            step: The framework's count of steps.
        """
        lost, skipped = self._driven.lost, float(self._driven.guard.summary().skipped)
        if "train_loss" in logs:
            logs["train_loss"] = _mean(logs["train_loss"], step - self._first, lost)
            logs[SKIPPED] = int(skipped)
        if "loss" in logs and step > self._last:
            logs["loss"] = _mean(logs["loss"], step - self._last, lost - self._lost)
            if skipped > self._skipped:
                logs[SKIPPED] = int(skipped - self._skipped)
            self._last, self._lost, self._skipped = step, lost, skipped


def _mean(mean: float, steps: int, lost: float) -> float:
    counted = steps - lost
    # No step had a loss, which is not the same as a loss of 0.
    return mean * steps / counted if counted > 0 else math.nan
