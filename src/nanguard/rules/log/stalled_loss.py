"""LOG009: a training loss that never moved."""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING

from nanguard.findings import Severity, name_of
from nanguard.rules.log.judging import LogRule, is_game, main_losses, main_norms, place
from nanguard.rules.log.missing import first_bad_norm
from nanguard.rules.rule import Fails, Passes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.findings import Finding
    from nanguard.sources.log.series import Log, MetricSeries, Point

# How many entries have to agree, and to which share of the loss.
_LEAST = 30
_SAME = 1e-3
# The loss of guessing between two classes; it is a stall in itself, also with a little noise.
_COIN, _NEAR_COIN = math.log(2), 5e-3
_EARLY = 0.2


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


def _still_from(series: MetricSeries) -> Point | None:
    """Returns where the flat end of a series begins; None if it has none that means a stall."""
    values = series.values
    if len(values) < _LEAST or series.bad():
        return None
    last = values[-1]
    if not last > 0.0:
        return None
    start = len(values)
    low = high = last
    while start:
        low, high = min(low, values[start - 1]), max(high, values[start - 1])
        if high - low > _SAME * abs(last):
            break
        start -= 1
    count = len(values) - start
    if start == 0:
        return series[0]
    frozen = count >= max(_LEAST, len(values) // 4) and last > _EARLY * median(
        values[: min(start, 16)]
    )
    if frozen and len(set(values[start:])) <= 2:
        return series[start]
    near = abs(last / _COIN - 1) < 4 * _NEAR_COIN
    return series[0] if near and _is_coin(values) else None


def _is_coin(values: object) -> bool:
    """Returns whether a loss is that of guessing, with no trend in its noise."""
    ordered = sorted(values)  # type: ignore[call-overload]
    count = len(ordered)
    middle = ordered[count // 2]
    wide = ordered[int(0.95 * count)] - ordered[int(0.05 * count)]
    return (
        abs(middle / _COIN - 1) < _NEAR_COIN / 5 and wide < 4 * _NEAR_COIN * _COIN and count >= 50
    )
