"""Losses and gradient norms far above what the run did before."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from nanguard.check.log.log_rule import (
    LogRule,
    drift_of,
    explosion_of,
    first_bad_norm,
    is_game,
    main_losses,
    main_norms,
    moved_before,
    place,
    same_row,
    spikes_of,
)
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Severity, name_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.log.log_rule import Spike
    from nanguard.check.log.series import Log, LogPoint, MetricSeries
    from nanguard.findings import Finding

# A spike so few entries before a NaN is how the NaN came about, not a finding of its own.
_ENTRIES_BEFORE_NAN = 3
# What follows so soon after it is its wake.
_AFTER = 10
# Times what would be usual; a jump below that is noise of a loss that is small, and a remark.
_FAR = 1.5


def _steady_losses(count: int, spike: int = 0) -> str:
    """Returns a log of a steady loss, with one spike if asked for."""
    losses = [9.0 if n == spike else 2.0 + 0.01 * (n * 7 % 11) for n in range(1, count + 1)]
    return "".join(f"step={n} loss={loss:.3f}\n" for n, loss in enumerate(losses, 1))


class LossSpike(LogRule):
    """The training loss jumped far above anything the run had done before.

    Why it breaks a run: a spike is a step on which the weights moved much too far or the batch was
    broken. Some runs come back from it, some diverge, and some meet the same batch again.

    The window is the guard's own: median and spread of the values before, and the tail that this
    run showed. Skip the batch, or go back to a checkpoint before it and lower the learning rate.
    """

    code = "LOG003"
    name = "loss-spike"
    severity = Severity.WARNING
    seen_in = "https://github.com/InternLM/InternLM-XComposer/issues/106"
    examples = (
        Passes(_steady_losses(32), "train.log"),
        Fails(_steady_losses(32, spike=28), line=28, file="train.log"),
    )

    def check(self, source: Log) -> Iterator[Finding]:
        """Yields the first spike of each training loss, and how many there are."""
        for series, spikes in loss_spikes(source):
            small = all(s.limit > 0 and s.point.value < _FAR * s.limit for s in spikes)
            found = self.at(source, series, spikes[0].point, _told(source, series, spikes))
            yield replace(found, severity=Severity.INFO) if small else found


def loss_spikes(log: Log) -> Iterator[tuple[MetricSeries, list[Spike]]]:
    """Yields training losses that have spikes of their own, with all of these."""
    bold = is_game(log)
    seen: set[int | None] = set()
    for series in sorted(main_losses(log), key=lambda one: not one.metric.plain):
        spikes = _own(log, series, spikes_of(series, positive=False, bold=bold))
        if not spikes or spikes[0].point.step in seen:
            continue
        seen.add(spikes[0].point.step if spikes[0].point.step is not None else -1)
        yield series, spikes


def _own(log: Log, series: MetricSeries, spikes: list[Spike]) -> list[Spike]:
    """Returns the spikes that are no eve of a NaN, no part of it and no divergence."""
    if not spikes:
        return []
    bad = series.bad()[:1]
    for norms in main_norms(log):
        first = first_bad_norm(log, norms) if norms.rank == series.rank else None
        row = same_row(series, first) if first else None
        if row:
            bad.append(row.index)
    if bad:
        nan = min(bad)
        spikes = [
            s
            for s in spikes
            if s.point.index < nan - _ENTRIES_BEFORE_NAN or s.point.index > nan + _AFTER
        ]
    drift = (drift_of(series) or explosion_of(series)) if spikes else None
    return [] if drift is not None and spikes[0].point.index >= drift[0].index else spikes


def _told(log: Log, series: MetricSeries, spikes: list[Spike]) -> str:
    first = spikes[0]
    message = (
        f"{series.name} jumped to {name_of(first.point.value)} at {place(first.point)}; "
        f"up to {name_of(first.limit)} would be usual"
    )
    if len(spikes) > 1:
        peak = max(spikes, key=lambda spike: spike.point.value).point
        message += f" ({len(spikes)} such values, the largest {name_of(peak.value)})"
    moved = moved_before(log, series, first.point)
    return f"{message}; before it, {' and '.join(moved)}" if moved else message


# A norm below the usual clip of 1 harms nobody, and one close to the usual is no accident.
_LEAST_NORM, _FACTOR = 1.0, 4.0


def _steady_norms(count: int, spike: int = 0) -> str:
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
        Passes(_steady_norms(32), "metrics.jsonl"),
        Fails(_steady_norms(32, spike=28), line=28, file="metrics.jsonl"),
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
