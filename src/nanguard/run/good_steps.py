"""The good steps of a script: written down, and looked at for what is unusual about them.

That is done for several steps at a time. What runs once in a step finds nothing of itself in the
processor's caches any more, and takes several times as long as what runs again and again.
"""

from __future__ import annotations

import math
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanguard.guard.optimizers import largest_rate
from nanguard.guard.verdicts import Reading

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nanguard.run.live import Live

# Steps that wait to be looked at, and how many seconds they may wait: whoever follows the record
# of a run hardly notices, and a step of 20 ms pays for a twentieth of a look.
_MOST_WAITING = 64
_SOON = 0.5


@dataclass(slots=True)
class GoodStep:
    """A step that was made.

    Attributes:
        optimizer: Whose step it is; None in a script that has none.
        step: Its number.
        numbers: What is known of its loss, gradient norm and loss scale.
        rate: The learning rate it was made with; None if that is not known.
        time: When it was made, in seconds since 1970.
    """

    optimizer: weakref.ref[Any] | None
    step: int
    numbers: Mapping[str, float | None]
    rate: float | None
    time: float


class GoodSteps:
    """Takes in good steps, and looks at them soon."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._waiting: list[GoodStep] = []
        self._due = 0.0
        self._has_looked = False  # the first step is: a record shows that a run has begun

    def add(
        self,
        optimizer: Any,
        step: int,
        numbers: Mapping[str, float | None],
        rates: list[dict[str, Any]] | None = None,
    ) -> None:
        """Takes in a step.

        Args:
            optimizer: Whose step it is; None in a script that has none.
            step: Its number.
            numbers: What is known of its loss, gradient norm and loss scale.
            rates: The parameter groups it was made with; None for those of the optimizer now.
        """
        live, rate, known = self._live, None, None
        factor = live.verdicts.policy.lr_factor
        if optimizer is not None:
            known = weakref.ref(optimizer)
            rate = largest_rate(optimizer.param_groups if rates is None else rates)
        if rate is not None:
            rate *= factor
        now = time.perf_counter()
        if not self._waiting and self._has_looked:
            self._due = now + _SOON
        self._waiting.append(GoodStep(known, step, numbers, rate, time.time()))
        if len(self._waiting) >= _MOST_WAITING or now >= self._due or self._is_awaited(factor):
            self.look()

    def _is_awaited(self, factor: float) -> bool:
        """Returns whether the next step depends on this one having been looked at."""
        return factor != 1.0 or self._live.options.spikes == "act"

    def look(self) -> None:
        """Looks at the steps that wait."""
        waiting, self._waiting, self._has_looked = self._waiting, [], True
        live = self._live
        if live.tracked is not None and waiting:
            live.tracked.good(waiting)
        for good in waiting:
            self._judge(good)

    def _judge(self, good: GoodStep) -> None:
        live, reading = self._live, reading_of(good.numbers)
        optimizer = None if good.optimizer is None else good.optimizer()
        if reading is None or not math.isfinite(reading.loss):
            live.verdicts.policy.good()
            return
        live.recent_losses.append(reading.loss)
        if optimizer is None:
            live.verdicts.policy.good()
            return
        lane = live.lane_of(optimizer)
        limits = live.verdicts.limits(lane, ahead=0)
        for finding in live.verdicts.passed(lane, reading, limits, good.step):
            live.writer.say(f"step {good.step}: {finding.message} ({finding.name})")


def reading_of(numbers: Mapping[str, float | None]) -> Reading | None:
    """Returns the numbers of a good step as a judge takes them; None if there is no loss."""
    loss, norm, scale = numbers.get("loss"), numbers.get("grad_norm"), numbers.get("scale")
    if loss is None:
        return None
    # Gradients that are scaled are left to the scaler, whether they overflow or not.
    overflow = norm is None or scale is not None
    return Reading(
        closed=False, loss=loss, grad_norm=norm or 0.0, terms={}, scale=scale, overflow=overflow
    )
