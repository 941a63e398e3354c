"""What moved before a number went bad: the gradient norm, the loss scale, the learning rate."""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING

from nanguard.check.log.names import Role
from nanguard.check.log.rules.judging import last_at, last_finite, told
from nanguard.findings import name_of

if TYPE_CHECKING:
    from nanguard.check.log.series import Log, MetricSeries, Point

# How many numbers before a bad one are looked at, and how many of them are its eve.
_LOOK = 64
_EVE = 3


def history_of(log: Log, series: MetricSeries, point: Point) -> str:
    """Returns the last healthy number and what moved before a bad one, as the end of a message."""
    healthy = last_finite(series, point.index)
    parts = ["no healthy value before it" if healthy is None else f"last healthy: {told(healthy)}"]
    moved = moved_before(log, series, point)
    if moved:
        parts.append("before it, " + " and ".join(moved))
    return "; ".join(parts)


def moved_before(log: Log, series: MetricSeries, point: Point) -> list[str]:
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
    words_of_own = {Role.LOSS: "the loss", Role.GRAD_NORM: "the gradient norm"}.get(series.role)
    own = _risen(words_of_own, _finite(series, point.index)) if words_of_own else None
    return [own, *out] if own else out


def _values_before(series: MetricSeries, point: Point) -> list[float]:
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
    if len(values) < 2 * _EVE:
        return None
    usual, peak = median(values[:-_EVE]), max(values[-_EVE:])
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


_WORDS = ((Role.GRAD_NORM, _norm), (Role.SCALE, _scale), (Role.RATE, _rate))
