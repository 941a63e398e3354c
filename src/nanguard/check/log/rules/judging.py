"""What the rules about logs share: the place of a number, and the runs a series is made of."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from nanguard.check.log.names import Role
from nanguard.check.log.series import Log
from nanguard.check.rule import Reads, Rule
from nanguard.findings import name_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.log.series import MetricSeries, Point
    from nanguard.findings import Finding

# More of these returns to an early step are epochs that count their batches from the start.
_MOST_RESTARTS = 5


class LogRule(Rule[Log]):
    """A rule about what a log says."""

    reads: ClassVar[Reads] = "log"

    @abstractmethod
    def check(self, source: Log) -> Iterator[Finding]:
        """Yields what is wrong with a log."""

    def at(self, log: Log, series: MetricSeries, point: Point, message: str) -> Finding:
        """Returns a finding about one number of a series."""
        more: dict[str, Any] = {"step": point.step, "rank": series.rank}
        return self.finding(message, path=log.path, line=point.line, where=series.name, **more)


def place(point: Point) -> str:
    """Returns where a number stands, as the log counts."""
    if point.step is not None:
        epoch = "" if point.epoch is None else f" (epoch {point.epoch:g})"
        return f"step {point.step}{epoch}"
    if point.epoch is not None:
        return f"epoch {point.epoch:g}"
    return f"line {point.line}" if point.line is not None else f"entry {point.index + 1}"


def told(point: Point) -> str:
    """Returns a number and its place: "1.777 at step 880"."""
    return f"{name_of(point.value)} at {place(point)}"


def training_losses(log: Log) -> list[MetricSeries]:
    """Returns the losses of training, terms and those of games included."""
    return [s for s in log.of(Role.LOSS) if not s.metric.evaluation]


def main_losses(log: Log) -> list[MetricSeries]:
    """Returns the losses that training lowers: whole ones, or terms if there are only terms."""
    losses = training_losses(log)
    plain = [s for s in losses if s.metric.plain]
    return plain or [s for s in losses if not s.metric.adversarial]


def is_game(log: Log) -> bool:
    """Returns whether losses play against each other, so that one that rises means nothing."""
    return any(s.metric.adversarial for s in log.of(Role.LOSS))


def main_norms(log: Log) -> list[MetricSeries]:
    """Returns the norms of whole gradients, or those of parts if there are only parts."""
    norms = log.of(Role.GRAD_NORM)
    return [s for s in norms if s.metric.plain] or norms


def runs_of(series: MetricSeries) -> list[range]:
    """Returns the stretches of a series that are one run each: a log may hold several."""
    count = len(series)
    if len(series.steps) != count or count < 2:
        return [range(count)]
    cuts = [0]
    epochs = series.epochs if len(series.epochs) == count else None
    for index in series.steps.restarts():
        if epochs and epochs[index] > epochs[index - 1]:
            continue
        cuts.append(index)
        if len(cuts) > _MOST_RESTARTS:
            return [range(count)]
    return [range(a, b) for a, b in zip(cuts, [*cuts[1:], count], strict=True)]


def same_row(series: MetricSeries, point: Point) -> Point | None:
    """Returns a series' number of the same line or step as another's; None if it has none."""
    count = len(series)
    for key in ("line", "step", "epoch"):
        wanted = getattr(point, key)
        column = getattr(series, f"{key}s")
        if wanted is None or len(column) != count or not count:
            continue
        index = last_at(series, key, wanted)
        if index is not None and getattr(series[index], key) == wanted:
            return series[index]
    return None


def last_at(series: MetricSeries, key: str, wanted: float) -> int | None:
    """Returns the last number at or before a line, a step or an epoch; None if there is none."""
    column = getattr(series, f"{key}s")
    low, high = 0, len(series)
    while low < high:
        middle = (low + high) // 2
        if column[middle] <= wanted:
            low = middle + 1
        else:
            high = middle
    return low - 1 if low else None


def last_finite(series: MetricSeries, index: int) -> Point | None:
    """Returns the last finite number before an index; None if there is none."""
    for at in range(index - 1, -1, -1):
        if math.isfinite(series.values[at]):
            return series[at]
    return None
