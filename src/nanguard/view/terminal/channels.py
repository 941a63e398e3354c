"""The series of a run that is watched, and what happened in them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nanguard.view.terminal.plot import PlotTrace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nanguard.check.log.series import MetricSeries


@dataclass(slots=True)
class Happening:
    """Something that happened in a run.

    Attributes:
        kind: The name of what it is.
        text: The same in words, safe to be shown.
        step: Its step, if one is known.
        alarm: Whether it was an alarm.
        clock: When it was seen.
        count: How often it came in a row.
        last: The last step of the row.
        value: The number it is about.
        old: Whether it stood in the log before the watch began.
        seen: When it came last.
    """

    kind: str
    text: str
    step: int | None
    alarm: bool
    clock: float
    count: int = 1
    last: int | None = None
    value: float | None = None
    old: bool = False
    seen: float = 0.0


@dataclass(slots=True)
class Channel:
    """One series.

    Attributes:
        series: What it is; its numbers are not kept.
        name: How it is called, safe to be shown.
        trace: Its curve.
        last: Its last number.
        step: The step of that; None if the log has none.
        epoch: The epoch of that.
        lowest: Its lowest number.
        lowest_step: The step of that.
        count: How many numbers it has.
    """

    series: MetricSeries
    name: str
    trace: PlotTrace = field(default_factory=PlotTrace)
    last: float = 0.0
    step: int | None = None
    epoch: float | None = None
    lowest: float = math.inf
    lowest_step: int | None = None
    count: int = 0

    def extend(
        self, values: Sequence[float], steps: Sequence[int] | None, *, begins: bool = False
    ) -> None:
        """Takes in numbers, and whether a new run begins with them."""
        self.trace.extend(values, steps, begins=begins)
        self.count += len(values)
        self.last = values[-1]
        self.step = steps[-1] if steps else self.step
        if math.isfinite(sum(values)):
            low = min(values)
        else:
            low = min((value for value in values if math.isfinite(value)), default=math.inf)
        if low < self.lowest:
            self.lowest = low
            self.lowest_step = steps[list(values).index(low)] if steps else None

    def restarts(self, series: MetricSeries) -> list[int]:
        """Returns where in new numbers steps begin anew; those of an epoch that is new do not."""
        count = len(series)
        if len(series.steps) != count:
            return []
        epochs = series.epochs if len(series.epochs) == count else None
        found = [
            index
            for index in series.steps.restarts()
            if not (epochs and epochs[index] > epochs[index - 1])
        ]
        on = epochs is not None and self.epoch is not None and epochs[0] > self.epoch
        if self.step is not None and series.steps[0] < self.step / 2 and not on:
            found.insert(0, 0)
        self.epoch = epochs[-1] if epochs else self.epoch
        return found
