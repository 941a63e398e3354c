"""Tells a NaN that stands for "not measured" or "left to the scaler" from one that is a fault."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

from nanguard.check.log.names import Role
from nanguard.check.log.rules.judging import last_at

if TYPE_CHECKING:
    from nanguard.check.log.series import Log, MetricSeries, Point

# Entries at the start of a run in which a scaler may still look for its level.
_START = 12
# So many bad norms in a row are more than a scaler's search.
_SEARCH = 8


def first_bad_loss(log: Log, series: MetricSeries) -> Point | None:
    """Returns the first number of a loss that is not finite; None if there is none."""
    bad = series.bad()
    if not bad or _unmeasured(log, series, bad):
        return None
    return series[bad[0]]


def first_bad_norm(log: Log, series: MetricSeries) -> Point | None:
    """Returns the first gradient norm that is not finite and not a matter of the loss scaler."""
    bad = series.bad()
    if not bad or _unmeasured(log, series, bad):
        return None
    if not log.of(Role.SCALE):
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
    for scale in log.of(Role.SCALE):
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
    losses = [s for s in log.of(Role.LOSS) if not s.metric.evaluation and s.rank == series.rank]
    return bool(losses) and all(
        math.isfinite(loss.values[i]) for loss in losses for i in places if i < len(loss)
    )
