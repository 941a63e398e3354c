"""What rules about logs share: the place of a number, what moved before it, what a NaN means."""

from __future__ import annotations

import math
from abc import abstractmethod
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar

from nanguard.check.log.quantities import Quantity
from nanguard.check.log.series import Log
from nanguard.check.rule import Reads, Rule
from nanguard.findings import name_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.log.series import LogPoint, MetricSeries
    from nanguard.findings import Finding

# More of these returns to an early step are epochs that count their batches from the start.
_MOST_RESTARTS = 5


class LogRule(Rule[Log]):
    """A rule about what a log says."""

    reads: ClassVar[Reads] = "log"

    @abstractmethod
    def check(self, source: Log) -> Iterator[Finding]:
        """Yields what is wrong with a log."""

    def at(self, log: Log, series: MetricSeries, point: LogPoint, message: str) -> Finding:
        """Returns a finding about one number of a series."""
        more: dict[str, Any] = {"step": point.step, "rank": series.rank}
        return self.finding(message, path=log.path, line=point.line, where=series.name, **more)


def place(point: LogPoint) -> str:
    """Returns where a number stands, as the log counts."""
    if point.step is not None:
        epoch = "" if point.epoch is None else f" (epoch {point.epoch:g})"
        return f"step {point.step}{epoch}"
    if point.epoch is not None:
        return f"epoch {point.epoch:g}"
    return f"line {point.line}" if point.line is not None else f"entry {point.index + 1}"


def told(point: LogPoint) -> str:
    """Returns a number and its place: "1.777 at step 880"."""
    return f"{name_of(point.value)} at {place(point)}"


def training_losses(log: Log) -> list[MetricSeries]:
    """Returns the losses of training, terms and those of games included."""
    return [s for s in log.of(Quantity.LOSS) if not s.metric.evaluation]


def main_losses(log: Log) -> list[MetricSeries]:
    """Returns the losses that training lowers: whole ones, or terms if there are only terms."""
    losses = training_losses(log)
    plain = [s for s in losses if s.metric.plain]
    return plain or [s for s in losses if not s.metric.adversarial]


def is_game(log: Log) -> bool:
    """Returns whether losses play against each other, so that one that rises means nothing."""
    return any(s.metric.adversarial for s in log.of(Quantity.LOSS))


def main_norms(log: Log) -> list[MetricSeries]:
    """Returns the norms of whole gradients, or those of parts if there are only parts."""
    norms = log.of(Quantity.GRAD_NORM)
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


def same_row(series: MetricSeries, point: LogPoint) -> LogPoint | None:
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


def last_finite(series: MetricSeries, index: int) -> LogPoint | None:
    """Returns the last finite number before an index; None if there is none."""
    for at in range(index - 1, -1, -1):
        if math.isfinite(series.values[at]):
            return series[at]
    return None


# Entries at the start of a run in which a scaler may still look for its level.
_START = 12
# So many bad norms in a row are more than a scaler's search.
_SEARCH = 8


def first_bad_loss(log: Log, series: MetricSeries) -> LogPoint | None:
    """Returns the first number of a loss that is not finite; None if there is none."""
    bad = series.bad()
    if not bad or _unmeasured(log, series, bad):
        return None
    return series[bad[0]]


def first_bad_norm(log: Log, series: MetricSeries) -> LogPoint | None:
    """Returns the first gradient norm that is not finite and not a matter of the loss scaler."""
    bad = series.bad()
    if not bad or _unmeasured(log, series, bad):
        return None
    if not log.of(Quantity.SCALE):
        early = bad[-1] < _START and len(bad) <= _SEARCH and len(series) > 2 * _START
        return None if early and _losses_are_finite(log, series, bad) else series[bad[0]]
    first = next((index for index in bad if not _left_to_scaler(log, series, index)), None)
    return None if first is None else series[first]


def _unmeasured(log: Log, series: MetricSeries, bad: list[int]) -> bool:
    """Returns whether NaN only fills the gaps between measurements."""
    values = series.values
    if any(math.isinf(values[i]) for i in bad):
        return False
    if not (series.metric.evaluation or log.sparse):
        return False
    finite = [index for index, value in enumerate(values) if math.isfinite(value)]
    if len(finite) < 2:
        return False
    leading = bad == list(range(len(bad)))
    if leading and series.metric.evaluation and len(finite) >= 3:
        return True
    gaps = [b - a for a, b in pairwise(finite)]
    widest = max(gaps)
    if len(values) - 1 - finite[-1] > widest:
        return False
    regular = len(finite) >= 3 and min(gaps[1:] or gaps) == max(gaps[1:] or gaps) > 1
    returns = sum(gap > 1 for gap in gaps)
    return regular or (bad[0] == 0 and returns >= 2)


def _left_to_scaler(log: Log, series: MetricSeries, index: int) -> bool:
    """Returns whether the loss scale fell with this norm, and the next norms are fine again."""
    point = series[index]
    key = "line" if point.line is not None else "step"
    wanted = getattr(point, key)
    after = series.values[index + 1 : index + 1 + _SEARCH]
    if after and not any(map(math.isfinite, after)):
        return False
    for scale in log.of(Quantity.SCALE):
        if wanted is None or len(getattr(scale, f"{key}s")) != len(scale):
            continue
        at = last_at(scale, key, wanted)
        if at is None:
            continue
        near = scale.values[max(0, at - 1) : at + 2]
        if any(b < a for a, b in pairwise(near)) and near[-1] >= 1.0:
            return True
    return False


def _losses_are_finite(log: Log, series: MetricSeries, places: list[int]) -> bool:
    losses = [s for s in log.of(Quantity.LOSS) if not s.metric.evaluation and s.rank == series.rank]
    return bool(losses) and all(
        math.isfinite(loss.values[i]) for loss in losses for i in places if i < len(loss)
    )


# How many numbers before a bad one are looked at, and how many of them are its eve.
_LOOK = 64
_ENTRIES_BEFORE_NAN = 3


def history_of(log: Log, series: MetricSeries, point: LogPoint) -> str:
    """Returns the last healthy number and what moved before a bad one, as the end of a message."""
    healthy = last_finite(series, point.index)
    parts = ["no healthy value before it" if healthy is None else f"last healthy: {told(healthy)}"]
    moved = moved_before(log, series, point)
    if moved:
        parts.append("before it, " + " and ".join(moved))
    return "; ".join(parts)


def moved_before(log: Log, series: MetricSeries, point: LogPoint) -> list[str]:
    """Returns what moved before a number of a series."""
    out: list[str] = []
    for role, words in _WORDS:
        for other in log.of(role):
            if other is series or other.metric.evaluation or other.rank not in (None, series.rank):
                continue
            said = words(_values_before(other, point))
            if said:
                out.append(said)
                break
    words_of_own = {Quantity.LOSS: "the loss", Quantity.GRAD_NORM: "the gradient norm"}.get(
        series.role
    )
    own = _risen(words_of_own, _finite(series, point.index)) if words_of_own else None
    return [own, *out] if own else out


def _values_before(series: MetricSeries, point: LogPoint) -> list[float]:
    for key in ("line", "step", "epoch"):
        wanted = getattr(point, key)
        if wanted is not None and len(getattr(series, f"{key}s")) == len(series):
            index = last_at(series, key, wanted)
            if index is None:
                return []
            same = getattr(series[index], key) == wanted and key != "epoch"
            return _finite(series, index if same else index + 1)
    return _finite(series, point.index)


def _finite(series: MetricSeries, end: int) -> list[float]:
    return [v for v in series.values[max(0, end - _LOOK) : end] if math.isfinite(v)]


def _risen(what: str, values: list[float]) -> str | None:
    if len(values) < 2 * _ENTRIES_BEFORE_NAN:
        return None
    usual, peak = median(values[:-_ENTRIES_BEFORE_NAN]), max(values[-_ENTRIES_BEFORE_NAN:])
    if usual > 0 and peak >= 2 * usual:
        return f"{what} had risen from {name_of(usual)} to {name_of(peak)}"
    return None


def _norm(values: list[float]) -> str | None:
    return _risen("the gradient norm", values)


def _scale(values: list[float]) -> str | None:
    if values and values[-1] <= max(values) / 2:
        return f"the loss scale had fallen from {name_of(max(values))} to {name_of(values[-1])}"
    return None


def _rate(values: list[float]) -> str | None:
    if not values:
        return None
    first, last = values[0], values[-1]
    if abs(last - first) > 0.1 * max(abs(first), abs(last)):
        verb = "risen" if last > first else "fallen"
        return f"the learning rate had {verb} from {name_of(first)} to {name_of(last)}"
    return f"the learning rate was {name_of(last)}"


_WORDS = ((Quantity.GRAD_NORM, _norm), (Quantity.SCALE, _scale), (Quantity.RATE, _rate))
