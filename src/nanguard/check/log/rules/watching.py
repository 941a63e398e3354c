"""Runs the guard's own watches over the numbers of a log."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from nanguard.check.log.rules.judging import runs_of
from nanguard.settings import Settings
from nanguard.signals.spikes import SpikeWindow

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.log.series import MetricSeries, Point

_SETTINGS = Settings()
# The least a window learns from in a short log.
_LEAST = 16
# Longer series are searched for places worth watching first.
_LONG = 20_000
_BLOCK = 64
# What a window remembers, in values, and so how far before such a place the watch begins.
_MEMORY = 3 * _SETTINGS.spike_window


@dataclass(frozen=True, slots=True)
class Spike:
    """A number far above those before it.

    Attributes:
        point: The number and its place.
        limit: What would have been usual.
    """

    point: Point
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
    size = max(_LEAST, size)
    window = SpikeWindow(
        size=size,
        warmup=max(_LEAST, min(_SETTINGS.spike_warmup, len(run) // 4, size)),
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
    if len(run) < _LONG:
        return [run]
    try:
        import numpy as np
    except ImportError:
        return [run]
    kind = np.float32 if series.values.typecode == "f" else np.float64
    values = np.frombuffer(series.values, kind)[run.start : run.stop]
    whole = values[: len(values) // _BLOCK * _BLOCK].astype(np.float64).reshape(-1, _BLOCK)
    tops = _block_tops(np, whole, positive=positive)
    blocks = [*np.flatnonzero(tops).tolist(), len(whole)]  # the rest of a block is always watched
    out: list[range] = []
    for block in blocks:
        begin = run.start + block * _BLOCK
        start, stop = max(run.start, begin - _MEMORY), min(run.stop, begin + _BLOCK)
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
        center = ordered[rows, at // 2 - (at == _BLOCK)]
        top = ordered[rows, at - 1]
        spread = (center - ordered[rows, at // 6]) + 1e-12
    floor = np.full_like(center, 0.1) if positive else 0.02 * np.abs(center)
    spread = np.maximum(spread, floor)
    # The level of a block is also that of the blocks before: a spike may fill a block.
    low_center = np.minimum(center, np.roll(center, 1))
    near_spread = (spread + np.roll(spread, 1)) / 2
    low_center[0], near_spread[0] = center[0], spread[0]
    return ~(top <= low_center + 5.0 * near_spread)
