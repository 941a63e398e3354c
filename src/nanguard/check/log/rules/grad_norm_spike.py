"""LOG004: a gradient norm far above what the run did before."""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING

from nanguard.check.log.log_rule import LogRule, main_norms, moved_before, place, spikes_of
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Severity, name_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.log.log_rule import Spike
    from nanguard.check.log.series import Log, LogPoint, MetricSeries
    from nanguard.findings import Finding

_ENTRIES_BEFORE_NAN = 3
# A norm below the usual clip of 1 harms nobody, and one close to the usual is no accident.
_LEAST_NORM, _FACTOR = 1.0, 4.0


def _steady(count: int, spike: int = 0) -> str:
    """Returns a log of steady norms, with one spike if asked for."""
    norms = [240.0 if n == spike else 1.0 + 0.04 * (n * 7 % 11) for n in range(1, count + 1)]
    return "".join(
        f'{{"step": {n}, "loss": 2.0, "grad_norm": {norm:.3f}}}\n'
        for n, norm in enumerate(norms, 1)
    )


class GradNormSpike(LogRule):
    """The gradient norm jumped far above anything the run had done before.

    Why it breaks a run: the gradient norm moves before the loss does. Without clipping, one such
    step throws the weights away; with it, the direction is still that of a broken batch, and
    Adam's second moment remembers its size for a thousand steps.

    Look at the batch of that step, clip at 1.0 or below, and skip steps the guard calls spikes.
    """

    code = "LOG004"
    name = "grad-norm-spike"
    severity = Severity.WARNING
    seen_in = "https://github.com/unslothai/unsloth/issues/5207"
    examples = (
        Passes(_steady(32), "metrics.jsonl"),
        Fails(_steady(32, spike=28), line=28, file="metrics.jsonl"),
    )

    def check(self, source: Log) -> Iterator[Finding]:
        """Yields the first spike of each rank's norm, and how many there are."""
        for series, spikes in norm_spikes(source):
            first = spikes[0]
            message = (
                f"{series.name} jumped to {name_of(first.point.value)} at {place(first.point)}; "
                f"up to {name_of(first.limit)} would be usual"
            )
            if len(spikes) > 1:
                message += f" ({len(spikes)} such values)"
            moved = moved_before(source, series, first.point)
            if moved:
                message += f"; before it, {' and '.join(moved)}"
            yield self.at(source, series, first.point, message)


def norm_spikes(log: Log) -> Iterator[tuple[MetricSeries, list[Spike]]]:
    """Yields gradient norms that have spikes, with all of these."""
    for series in main_norms(log)[:16]:
        bad = series.bad()[:1]
        spikes = [
            spike
            for spike in spikes_of(series, positive=True, bold=False)
            if _matters(series, spike.point)
            and not any(0 < b - spike.point.index <= _ENTRIES_BEFORE_NAN for b in bad)
        ]
        if spikes:
            yield series, spikes


def _matters(series: MetricSeries, point: LogPoint) -> bool:
    before = series.values[max(0, point.index - 32) : point.index]
    finite = [value for value in before if math.isfinite(value)]
    return point.value >= max(_LEAST_NORM, _FACTOR * median(finite) if finite else 0.0)
