"""The good steps of a script: written down, and looked at for what is unusual about them.

That is done for several steps at a time. What runs once in a step finds nothing of itself in the
processor's caches any more, and takes several times as long as what runs again and again.
"""

from __future__ import annotations

import math
import time
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from nanguard.guard.optimizers import largest_rate
from nanguard.guard.verdicts import Reading

if TYPE_CHECKING:
    from nanguard.run.live import Live

# Steps that wait to be looked at, and how many seconds they may wait: whoever follows the record
# of a run hardly notices, and a step of 20 ms pays for a twentieth of a look.
_MOST_WAITING = 64
_SOON = 0.5


class Numbers(NamedTuple):
    """What is known of the numbers of a step.

    Attributes:
        loss: The sum of its losses.
        grad_norm: The norm of its gradients.
        scale: The scale of its loss.
    """

    loss: float | None
    grad_norm: float | None
    scale: float | None = None


class GoodStep(NamedTuple):
    """A step that was made.

    Attributes:
        optimizer: Whose step it is; None in a script that has none.
        step: Its number.
        numbers: What is known of its numbers.
        rate: The learning rate it was made with; None if that is not known.
        time: When it was made, in seconds since 1970.
    """

    optimizer: weakref.ref[Any] | None
    step: int
    numbers: Numbers
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
        numbers: Numbers,
        rates: list[dict[str, Any]] | None = None,
    ) -> None:
        """Takes in a step.

        Args:
            optimizer: Whose step it is; None in a script that has none.
            step: Its number.
            numbers: What is known of its numbers.
            rates: The parameter groups it was made with; None for those of the optimizer now.
        """
        live, waiting, rate, known = self._live, self._waiting, None, None
        factor = live.verdicts.policy.lr_factor
        if optimizer is not None:
            known = weakref.ref(optimizer)
            rate = largest_rate(optimizer.param_groups if rates is None else rates)
            if rate is not None:
                rate *= factor
        now = time.time()
        if not waiting and self._has_looked:
            self._due = now + _SOON
        waiting.append(GoodStep(known, step, numbers, rate, now))
        # The next step may depend on this one having been looked at.
        awaited = factor != 1.0 or live.acts_on_spikes
        if awaited or len(waiting) >= _MOST_WAITING or now >= self._due:
            self.look()

    def look(self) -> None:
        """Looks at the steps that wait."""
        waiting, self._waiting, self._has_looked = self._waiting, [], True
        live = self._live
        if live.tracked is not None and waiting:
            live.tracked.good(waiting)
        known: weakref.ref[Any] | None = None
        lane: Any = None
        for good in waiting:
            if good.optimizer is not known:
                known = good.optimizer
                optimizer = None if known is None else known()
                lane = None if optimizer is None else live.lane_of(optimizer)
            self._judge(good, lane)

    def _judge(self, good: GoodStep, lane: Any) -> None:
        live, reading = self._live, reading_of(good.numbers)
        if reading is None or not math.isfinite(reading.loss):
            live.verdicts.policy.good()
            return
        live.recent_losses.append(reading.loss)
        if lane is None:
            live.verdicts.policy.good()
            return
        limits = live.verdicts.limits(lane, ahead=0)
        for finding in live.verdicts.passed(lane, reading, limits, good.step):
            live.writer.say(f"step {good.step}: {finding.message} ({finding.name})")


def reading_of(numbers: Numbers) -> Reading | None:
    """Returns the numbers of a good step as a judge takes them; None if there is no loss."""
    loss, norm, scale = numbers
    if loss is None:
        return None
    # Gradients that are scaled are left to the scaler, whether they overflow or not.
    overflow = norm is None or scale is not None
    return Reading(
        closed=False, loss=loss, grad_norm=norm or 0.0, terms={}, scale=scale, overflow=overflow
    )
