"""What rules about logs share: the place of a number, what moved before it, what a NaN means.

Spikes and climbs are judged by the windows of the guard.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from itertools import chain, pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, ClassVar

from nanguard.check.log.quantities import Quantity
from nanguard.check.log.series import Log
from nanguard.check.rule import Reads, Rule
from nanguard.findings import name_of
from nanguard.settings import Settings
from nanguard.signals import DriftWatch, SpikeWindow

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nanguard.check.log.series import LogPoint, MetricSeries
    from nanguard.findings import Finding

# More of these returns to an early step are epochs that count their batches from the start.
_MOST_RESTARTS = 5
_SETTINGS = Settings()
# The least a window learns from in a short log.
_LEAST_WINDOW = 16
# Longer series are searched for places worth watching first.
_LONG_RUN = 20_000
_ENTRIES_PER_BLOCK = 64
# What a window remembers, in values, and so how far before such a place the watch begins.
_MEMORY = 3 * _SETTINGS.spike_window


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


def point_text(point: LogPoint) -> str:
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
# This many bad norms in a row are more than a scaler's search.
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
    parts = [
        "no healthy value before it" if healthy is None else f"last healthy: {point_text(healthy)}"
    ]
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


@dataclass(frozen=True, slots=True)
class Spike:
    """A number far above those before it.

    Attributes:
        point: The number and its place.
        limit: What would have been usual.
    """

    point: LogPoint
    limit: float


def spikes_of(series: MetricSeries, *, positive: bool, bold: bool) -> list[Spike]:
    """Returns the spikes of a series.

    Args:
        series: The numbers.
        positive: Whether they are sizes, such as norms.
        bold: Whether only those are meant that the guard would act on.
    """
    found: list[Spike] = []
    for run in runs_of(series):
        found += _spikes_in(series, run, positive=positive, bold=bold)
    return found


def _spikes_in(series: MetricSeries, run: range, *, positive: bool, bold: bool) -> Iterator[Spike]:
    # A short log is mostly descent: a window as long as the log would hold its start for usual.
    size = _SETTINGS.spike_window if positive else min(_SETTINGS.spike_window, len(run) // 8)
    size = max(_LEAST_WINDOW, size)
    window = SpikeWindow(
        size=size,
        warmup=max(_LEAST_WINDOW, min(_SETTINGS.spike_warmup, len(run) // 4, size)),
        warn=_SETTINGS.spike_warn,
        act=_SETTINGS.spike_act,
        positive=positive,
    )
    for index in chain(*_worth_watching(series, run, positive=positive)):
        value = series.values[index]
        if not math.isfinite(value):
            continue
        limits = window.limits()
        if not value <= (limits.act if bold else limits.warn):
            yield Spike(series[index], limits.act if bold else limits.warn)
        if not value <= limits.act:
            window.reject(value)
        else:
            window.accept(value)


def _worth_watching(series: MetricSeries, run: range, *, positive: bool) -> list[range]:
    """Returns the stretches of a long run that may hold a spike, with what leads up to them."""
    if len(run) < _LONG_RUN:
        return [run]
    try:
        import numpy as np
    except ImportError:
        return [run]
    kind = np.float32 if series.values.typecode == "f" else np.float64
    values = np.frombuffer(series.values, kind)[run.start : run.stop]
    whole = (
        values[: len(values) // _ENTRIES_PER_BLOCK * _ENTRIES_PER_BLOCK]
        .astype(np.float64)
        .reshape(-1, _ENTRIES_PER_BLOCK)
    )
    tops = _block_tops(np, whole, positive=positive)
    blocks = [*np.flatnonzero(tops).tolist(), len(whole)]  # the rest of a block is always watched
    out: list[range] = []
    for block in blocks:
        begin = run.start + block * _ENTRIES_PER_BLOCK
        start, stop = max(run.start, begin - _MEMORY), min(run.stop, begin + _ENTRIES_PER_BLOCK)
        if out and start <= out[-1].stop:
            out[-1] = range(out[-1].start, stop)
        else:
            out.append(range(start, stop))
    return out


def _block_tops(np: Any, whole: Any, *, positive: bool) -> Any:
    """Returns which blocks hold a value well above the level around them."""
    inner = np.log(np.maximum(whole, 1e-30)) if positive else whole
    inner = np.where(np.isfinite(inner), inner, np.nan)
    with np.errstate(all="ignore"):
        ordered = np.sort(inner, axis=1)  # NaN comes last
        count = np.isfinite(ordered).sum(axis=1)
        at = np.maximum(count, 1)
        rows = np.arange(len(ordered))
        center = ordered[rows, at // 2 - (at == _ENTRIES_PER_BLOCK)]
        top = ordered[rows, at - 1]
        spread = (center - ordered[rows, at // 6]) + 1e-12
    floor = np.full_like(center, 0.1) if positive else 0.02 * np.abs(center)
    spread = np.maximum(spread, floor)
    # The level of a block is also that of the blocks before: a spike may fill a block.
    low_center = np.minimum(center, np.roll(center, 1))
    near_spread = (spread + np.roll(spread, 1)) / 2
    low_center[0], near_spread[0] = center[0], spread[0]
    return ~(top <= low_center + 5.0 * near_spread)


_CLIMB_SETTINGS = Settings()
# How many values of a run are judged: drift is slow, so a sample of a longer run shows as much.
_LONG_CLIMB = 20_000
# A climb that multiplies: into how many blocks a run is cut, how many of the last have to grow,
# and by how much each. Rewards that grow make a loss grow too, but they level off.
_BLOCKS, _GROWING, _GROWTH = 16, 4, 1.3
# Growth that falls below this share of the growth before it levels off.
_SLOWING = 0.7
# How far above its beginning a loss is lost, where bounds keep it finite, and for how many entries.
_BEYOND_START, _LONG_ENOUGH = 1e6, 5
# How many entries are its beginning, and below which size everything is far above it: a policy
# compared with itself, or a model with its own copy, has a loss of about zero.
_BEGINNING, _SIZE = 9, 0.01
# How many times its beginning a loss that never fell may grow; up to this size, if it began at
# about zero, which its first entry tells.
_GROWN, _GROWN_SIZE, _ABOUT_ZERO = 3.0, 1.0, 0.01
# How far such a loss has to pass where it began: one that had fallen before, and one that had not.
_BEYOND, _FAR_BEYOND = 10.0, 100.0


def drift_of(series: MetricSeries) -> tuple[LogPoint, str] | None:
    """Returns where a loss that diverges and does not come back began to rise, and how far."""
    for run in runs_of(series):
        found = _lost_in(series, run) or _drift_in(series, run)
        if found is not None:
            return found
    return None


def _lost_in(series: MetricSeries, run: range) -> tuple[LogPoint, str] | None:
    """Returns where a loss left for good, in its first entries, all it ever was."""
    values = series.values
    began = _beginning(values[run.start : run.start + _BEGINNING])
    if began < _SIZE:
        return None
    first = run.stop
    while first > run.start and values[first - 1] > _BEYOND_START * began:
        first -= 1
    if run.stop - first < max(_LONG_ENOUGH, len(run) // 2):
        return None
    now = median(values[first : run.stop])
    message = f"the loss stands at {name_of(now)}, {now / began:.3g} times where it began"
    return series[first], message


def _beginning(values: Sequence[float]) -> float:
    """Returns where a loss began: the middle of its first entries, less those already lost."""
    sizes = [v for v in values if 0.0 <= v < math.inf]
    lost = _BEYOND_START * max(min(sizes, default=0.0), _SIZE)
    return median([v for v in sizes if v <= lost] or [0.0])


def _drift_in(series: MetricSeries, run: range) -> tuple[LogPoint, str] | None:
    sample = run[:: max(1, len(run) // _LONG_CLIMB)]
    block = max(1, min(_CLIMB_SETTINGS.spike_window // 2, len(sample) // 16))
    watch = DriftWatch(block=block, growth=_growth(series, run, sample[:block]))
    climb: tuple[LogPoint, str] | None = None
    for index in sample:
        message = watch.accept(series.values[index])
        if message and climb is None:
            climb = series[_lowest(series, run.start, index) + 1], message
        elif climb and watch.recovered:
            climb = None
    return climb


def _growth(series: MetricSeries, run: range, block: range) -> float:
    """Returns how many times its first median a loss that never fell may grow."""
    values = series.values
    first, began = values[run.start], _beginning(values[run.start : run.start + _BEGINNING])
    if not 0.0 <= first <= _ABOUT_ZERO * max(began, _SIZE):
        return _GROWN
    start = median(values[index] for index in block)
    return max(_GROWN, _GROWN_SIZE / start) if start > 0.0 else _GROWN


def explosion_of(series: MetricSeries) -> tuple[LogPoint, str] | None:
    """Returns where a loss that multiplies up to the end of its run began to, and how far."""
    for run in runs_of(series):
        values = [v for v in series.values[run.start : run.stop] if math.isfinite(v)]
        size = len(values) // _BLOCKS
        if size < 2:
            continue
        # Counted from the end, so that the last block is whole.
        first = len(values) - size * _BLOCKS
        blocks = [median(values[at : at + size]) for at in range(first, len(values), size)]
        if _multiplies(blocks):
            began = series[min(_lowest(series, run.start, run.stop) + 1, run.stop - 1)]
            return began, (
                f"the loss multiplies: from {name_of(min(blocks))} at best to "
                f"{name_of(blocks[-1])}, {blocks[-1] / blocks[0]:.3g} times where it began"
            )
    return None


def _multiplies(blocks: list[float]) -> bool:
    start, best, recent = blocks[0], min(blocks), blocks[-_GROWING - 1 :]
    if best <= 0.0:
        return False
    growths = [math.log(b / a) for a, b in pairwise(recent)]
    if min(growths) < math.log(_GROWTH) or growths[-1] < _SLOWING * fmean(growths[:-1]):
        return False
    return recent[-1] >= start * (_BEYOND if best < start / 1.5 else _FAR_BEYOND)


def _lowest(series: MetricSeries, start: int, stop: int) -> int:
    values = series.values
    return min((i for i in range(start, stop) if values[i] == values[i]), key=values.__getitem__)
