"""LOG009: a training loss that never moved."""

from __future__ import annotations

import math
from statistics import fmean, median, pstdev
from typing import TYPE_CHECKING

from nanguard.check.log.log_rule import (
    LogRule,
    first_bad_norm,
    is_game,
    main_losses,
    main_norms,
    place,
)
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Severity, name_of

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterator, Sequence

    from nanguard.check.log.series import Log, LogPoint, MetricSeries
    from nanguard.findings import Finding

# How many entries have to agree, and to which share of the loss.
_ENTRIES_ALIKE = 30
_SAME = 1e-3
# It takes this many entries to tell noise from a trend; less than this share is no trend.
_MANY, _TREND = 50, 5e-4
# The width of nine tenths of the values: at any level, and at that of guessing between classes,
# where fewer entries are enough.
_CALM, _NOISY = 3e-3, 2e-2
_FEW_ENTRIES = 20
_CLASSES = (2, 3, 4, 5, 6, 8, 10, 20, 50, 100, 101, 200, 256, 1000, 1024, 8192, 21841, 32000, 50257)
# A loss that stops below this share of its start has learned something.
_EARLY = 0.2
# How far above its best a loss is that has lost what it had learned.
_UNLEARNED = 1.15


class StalledLoss(LogRule):
    """The training loss stays where it began, or stops for good while it is still high.

    Why it breaks a run: nothing is learned. Gradients are zero, cut off or never applied: a loss
    clamped to a constant, a detached graph, a frozen model, a learning rate of zero, labels that
    say nothing, or weights that no step reaches any more because each one is skipped.

    Look at the gradient norm of the first step and at what the optimizer was given.
    """

    code = "LOG009"
    name = "stalled-loss"
    severity = Severity.INFO
    seen_in = "https://github.com/tensorflow/tensorflow/issues/12287"
    examples = (
        Passes("".join(f"step {n} loss {2.0 / n:.4f}\n" for n in range(1, 33)), "train.log"),
        Fails(
            "".join(f"step {n} loss {0.69314 + n % 3 / 1e5:.5f}\n" for n in range(1, 33)),
            file="train.log",
        ),
    )

    def check(self, source: Log) -> Iterator[Finding]:
        """Yields one finding for the first training loss that stands still to the end."""
        if is_game(source) or any(first_bad_norm(source, norms) for norms in main_norms(source)):
            return
        for series in main_losses(source)[:1]:
            start = _still_from(series)
            if start is None:
                continue
            since = "from the start" if start.index == 0 else f"since {place(start)}"
            count = len(series) - start.index
            yield self.at(
                source,
                series,
                start,
                f"{series.name} stands still at {name_of(start.value)} {since}, "
                f"over {count} entries up to {place(series[-1])}",
            )


def _still_from(series: MetricSeries) -> LogPoint | None:
    """Returns where the flat end of a series begins; None if it has none that means a stall."""
    values = series.values
    count = len(values)
    if count < _FEW_ENTRIES or series.bad() or not values[-1] > 0.0:
        return None
    guessed = _share_of_chance(values) * (1 if _is_whole(series) else 0.5)
    if count < _ENTRIES_ALIKE and not guessed:
        return None
    start = _flat_from(values, _SAME)
    if start == 0 or (count >= _MANY and _is_calm(values, max(guessed, _CALM))):
        return series[0]
    if count - start >= max(_ENTRIES_ALIKE, count // 4) and len(set(values[start:])) <= 2:
        early = median(values[: min(start, 16)])
        return series[start] if values[-1] > _EARLY * early else None
    return _fallen_back(series)


def _flat_from(values: array[float], share: float) -> int:
    """Returns from where on values stay within a share of the last one."""
    start = len(values)
    low = high = values[-1]
    while start:
        low, high = min(low, values[start - 1]), max(high, values[start - 1])
        if high - low > share * abs(values[-1]):
            break
        start -= 1
    return start


def _fallen_back(series: MetricSeries) -> LogPoint | None:
    """Returns where a loss lost what it had learned and never moved again."""
    values = series.values
    start = _flat_from(values, 4 * _CALM)
    size = max(4, start // 16)
    if start < 2 * size or len(values) - start < max(_ENTRIES_ALIKE, len(values) // 4):
        return None
    best = min(median(values[at : at + size]) for at in range(0, start - size + 1, size))
    level = median(values[start:])
    return series[start] if level > _UNLEARNED * best and _is_calm(values[start:], _CALM) else None


def _is_calm(values: Sequence[float], share: float) -> bool:
    """Returns whether values stay within a share of their level, with no trend in their noise."""
    ordered = sorted(values)
    count = len(ordered)
    level = abs(ordered[count // 2])
    if ordered[int(0.95 * count)] - ordered[int(0.05 * count)] > share * level:
        return False
    quarter = count // 4
    trend = abs(fmean(values[:quarter]) - fmean(values[-quarter:]))
    noise = pstdev(ordered) * math.sqrt(2 / quarter)
    return trend < max(_TREND * level, 3 * noise)


def _share_of_chance(values: Sequence[float]) -> float:
    """Returns how noisy a loss may be that is that of guessing; 0 if it is not."""
    middle = sorted(values)[len(values) // 2]
    near = any(abs(middle / math.log(classes) - 1) < _SAME for classes in _CLASSES)
    return _NOISY if near else 0.0


def _is_whole(series: MetricSeries) -> bool:
    """Returns whether a log begins where its run begins: one that learned before may stand."""
    last = len(series) - 1
    if len(series.steps) == len(series):
        return series.steps[0] <= 2 * max(1, (series.steps[last] - series.steps[0]) // last)
    return len(series.epochs) == len(series) and series.epochs[0] <= 1.0
