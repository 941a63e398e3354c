"""Drift and a falling loss scale: what changes slowly before a run goes bad.

Pure Python, like ``spikes.py``, and on the same principle.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import pairwise
from typing import Any

from nanguard.findings import name_of
from nanguard.signals.spikes import SIGMA, median_of

# Blocks in a row that have to rise before a loss is said to drift; cycles rise for fewer.
_RISING = 4


class DriftWatch:
    """Warns of slow divergence: a loss that gives back much of what it had gained.

    It compares the medians of whole blocks of accepted values, so single spikes do not count. A
    loss that never fell (reinforcement learning, the generator of a GAN) gained nothing, so it
    has nothing to give back and stays silent, unless it is asked to speak about mere growth.

    Attributes:
        block: How many accepted values make one median.
        growth: How many times its first median a loss that never fell may grow; None for any.
    """

    def __init__(self, *, block: int, growth: float | None = None) -> None:
        self.block = block
        self.growth = growth
        self._current: list[float] = []
        self._medians: deque[float] = deque(maxlen=_RISING + 1)
        self._start: float | None = None
        self._best = math.inf
        self._best_spread = 0.0
        self._told = False

    def accept(self, value: float) -> str | None:
        """Takes in an accepted value; returns a message when the loss has begun to diverge."""
        if not math.isfinite(value):
            return None
        self._current.append(value)
        if len(self._current) < self.block:
            return None
        ordered = sorted(self._current)
        self._current = []
        median = median_of(ordered)
        spread = SIGMA * median_of(sorted(abs(v - median) for v in ordered))
        self._medians.append(median)
        if self._start is None:
            self._start = median
        if median < self._best:
            self._best, self._best_spread, self._told = median, spread, False
        return self._judge(median, self._start)

    @property
    def recovered(self) -> bool:
        """Whether the last median is no longer that of a loss that diverges."""
        if self._start is None:
            return True
        return self._lost(self._medians[-1], self._start) is None

    def _judge(self, median: float, start: float) -> str | None:
        recent = list(self._medians)
        rising = len(recent) > _RISING and all(a < b for a, b in pairwise(recent))
        lost = self._lost(median, start) if rising and not self._told else None
        if lost is None:
            return None
        self._told = True
        return (
            f"the loss rises: its median over {self.block} steps went from {name_of(self._best)} "
            f"at best to {name_of(median)}, {lost}"
        )

    def _lost(self, median: float, start: float) -> str | None:
        """Returns how much of its gain a loss has given back, if that is much."""
        noise = 6.0 * max(self._best_spread, 0.01 * abs(self._best))
        gained, lost = start - self._best, median - self._best
        if gained > noise:
            return (
                f"{lost / gained:.0%} of all it had gained"
                if lost > max(noise, 0.5 * gained)
                else None
            )
        if self.growth is not None and start > 0.0 and median > self.growth * start:
            return f"{median / start:.3g} times where it began"
        return None

    def state_dict(self) -> dict[str, Any]:
        """Returns what the watch has seen."""
        return {
            "current": list(self._current),
            "medians": list(self._medians),
            "start": self._start,
            "best": self._best,
            "best_spread": self._best_spread,
            "told": self._told,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from what ``state_dict`` returned."""
        self._current = list(state["current"])
        self._medians = deque(state["medians"], maxlen=_RISING + 1)
        self._start = state["start"]
        self._best = state["best"]
        self._best_spread = state["best_spread"]
        self._told = state["told"]


class ScaleWatch:
    """Warns of a GradScaler whose scale keeps falling.

    The first fall from the initial scale is how the scaler finds its level. A fall after that
    says that gradients overflow whatever the scale is.

    Attributes:
        calm: Steps without a fall after which the scale counts as settled.
        factor: How far below its settled value it may fall without a warning.
        patient: Whether a scale that settles again further down is still held to where it came
            from, until it grows: for falls with long rests between them.
    """

    def __init__(self, *, calm: int = 20, factor: float = 32.0, patient: bool = False) -> None:
        self.calm = calm
        self.factor = factor
        self.patient = patient
        self._last: float | None = None
        self._quiet = 0
        self._level: float | None = None
        self._told = False

    def accept(self, scale: float) -> str | None:
        """Takes in the scale after a step; returns a message when it keeps falling."""
        if not math.isfinite(scale):
            return None
        fell = self._last is not None and scale < self._last
        grew = self._last is not None and scale > self._last
        self._last = scale
        self._quiet = 0 if fell else self._quiet + 1
        held = self.patient and not grew and self._level is not None and self._level > scale
        if self._quiet >= self.calm and not held:
            self._level, self._told = scale, False
        low = scale < 1.0 or (self._level is not None and scale <= self._level / self.factor)
        if self._told or not (fell and low):
            return None
        self._told = True
        before = "" if self._level is None else f" from {name_of(self._level)}"
        return f"the loss scale fell{before} to {name_of(scale)}: gradients overflow at any scale"

    def state_dict(self) -> dict[str, Any]:
        """Returns what the watch has seen."""
        return {
            "last": self._last,
            "quiet": self._quiet,
            "level": self._level,
            "told": self._told,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from what ``state_dict`` returned."""
        self._last = state["last"]
        self._quiet = state["quiet"]
        self._level = state["level"]
        self._told = state["told"]
