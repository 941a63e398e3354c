"""Spikes and climbs in a log, judged by the windows of the guard."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain, pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from nanguard.check.log.log_rule import runs_of
from nanguard.findings import name_of
from nanguard.settings import Settings
from nanguard.signals.drift import DriftWatch
from nanguard.signals.spikes import SpikeWindow

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nanguard.check.log.series import LogPoint, MetricSeries

_SETTINGS = Settings()
# The least a window learns from in a short log.
_LEAST_WINDOW = 16
# Longer series are searched for places worth watching first.
_LONG_RUN = 20_000
_ENTRIES_PER_BLOCK = 64
# What a window remembers, in values, and so how far before such a place the watch begins.
_MEMORY = 3 * _SETTINGS.spike_window


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
# Drift is slow: of a longer run, every so many values tell as much as all of them.
_LONG_CLIMB = 20_000
# A climb that multiplies: into how many blocks a run is cut, how many of the last have to grow,
# and by how much each. Rewards that grow make a loss grow too, but they level off.
_BLOCKS, _GROWING, _GROWTH = 16, 4, 1.3
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
    told: tuple[LogPoint, str] | None = None
    for index in sample:
        message = watch.accept(series.values[index])
        if message and told is None:
            told = series[_lowest(series, run.start, index) + 1], message
        elif told and watch.recovered:
            told = None
    return told


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
