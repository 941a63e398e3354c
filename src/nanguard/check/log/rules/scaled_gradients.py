"""Gradients that are not finite, and the loss scale that keeps falling as they overflow."""

from __future__ import annotations

from bisect import bisect_right
from itertools import groupby
from typing import TYPE_CHECKING

from nanguard.check.log.log_rule import (
    LogRule,
    first_bad_norm,
    history_of,
    main_losses,
    place,
    runs_of,
)
from nanguard.check.log.quantities import Quantity
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Severity, name_of
from nanguard.signals import ScaleWatch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.log.series import Log, LogPoint, MetricSeries
    from nanguard.findings import Finding


class NonFiniteGradNorm(LogRule):
    """A gradient norm in the log is NaN or infinite, and no loss scaler took care of it.

    Why it breaks a run: clipping does not help, because it divides by the norm, and NaN gradients
    that are zeroed or applied leave a run that trains nothing. A loss that still looks fine hides
    it for as long as it is computed from weights of before.

    An overflow that the loss scaler meets while it looks for its level is left alone.
    """

    code = "LOG002"
    name = "non-finite-grad-norm"
    severity = Severity.ERROR
    seen_in = "https://github.com/InternLM/xtuner/issues/187"
    examples = (
        Passes(
            "step 1 loss 2.9 grad_norm inf scale 65536\nstep 2 loss 2.8 grad_norm 0.9 scale 32768\n"
            "step 3 loss 2.7 grad_norm 1.1 scale 32768\n",
            "train.log",
        ),
        Fails(
            "{'loss': 2.1, 'grad_norm': 0.9, 'epoch': 0.1}\n"
            "{'loss': 2.0, 'grad_norm': nan, 'epoch': 0.2}\n",
            line=2,
            file="train.log",
        ),
    )

    def check(self, source: Log) -> Iterator[Finding]:
        """Yields the first bad norm of each rank."""
        bad = [
            (point.step if point.step is not None else point.index, index, series, point)
            for index, series in enumerate(source.of(Quantity.GRAD_NORM))
            if (point := first_bad_norm(source, series)) is not None
        ]
        for _, _, series, point in sorted(bad, key=lambda one: one[:2])[:1]:
            count = len(series.bad())
            many = f" ({count} of {len(series)} values are not finite)" if count > 1 else ""
            message = f"{series.name} is {name_of(point.value)} at {place(point)}{many}"
            yield self.at(source, series, point, f"{message}; {history_of(source, series, point)}")
        notes = [note for note in source.notes if note.role is Quantity.GRAD_NORM]
        if notes and not bad:
            at = "" if notes[0].step is None else f" at step {notes[0].step}"
            yield self.finding(
                f"the log says{at}: {notes[0].said}",
                path=source.path,
                line=notes[0].line,
                where="gradient norm",
                step=notes[0].step,
            )


def _scales(scales: list[float]) -> str:
    return "".join(
        f'{{"step": {n}, "loss": 2.0, "scale": {scale}}}\n' for n, scale in enumerate(scales, 1)
    )


class FallingLossScale(LogRule):
    """The loss scale keeps falling after it had found its level.

    Why it breaks a run: each fall is a step that was skipped because gradients overflowed. When
    no scale is small enough, the gradients are NaN or Inf by themselves: nothing is trained any
    more, and small gradients become zero on the way down.

    The first fall from 65536 is how the scaler finds its level, and is left alone. Train in
    bfloat16, or find the operation that overflows.
    """

    code = "LOG006"
    name = "falling-loss-scale"
    severity = Severity.WARNING
    seen_in = "https://github.com/Junjue-Wang/FactSeg/issues/6"
    examples = (
        Passes(_scales([65536.0, 32768.0, 16384.0] + [16384.0] * 22), "a.jsonl"),
        Fails(
            _scales([65536.0] * 22 + [32768.0 / 2**n for n in range(8)]),
            file="a.jsonl",
        ),
    )

    def check(self, source: Log) -> Iterator[Finding]:
        """Yields one finding for the first scale that falls for good."""
        for series in source.of(Quantity.SCALE):
            found = scale_of(series, source)
            if found is not None:
                point, message = found
                low = min(v for v in series.values if v == v)
                message = f"at {place(point)}, {message} (the lowest in this log is {low:g})"
                yield self.at(source, series, point, message)
                return
        for note in source.notes:
            if note.role is Quantity.SCALE:
                at = "" if note.step is None else f" at step {note.step}"
                yield self.finding(
                    f"the log says{at}: {note.said}",
                    path=source.path,
                    line=note.line,
                    where="loss scale",
                    step=note.step,
                )
                return


# How far a scale may fall in many small falls with no growth between them.
_FALL_IN_ALL = 1024.0
# A scale of 1 scales nothing: a scaler that fell to it from here has found no level.
_ONCE = 256.0
_SETTLED_ENTRIES = 20
# How many times as many lines of loss make a scale one that is written now and then.
_OFTEN = 2


def scale_of(series: MetricSeries, log: Log | None = None) -> tuple[LogPoint, str] | None:
    """Returns where a loss scale was seen to keep falling, and what is said about it.

    Args:
        series: The scales.
        log: The log they stand in; the lines of its loss tell how long a scale held that is only
            written down when it falls.
    """
    beside = _beside(series, log)
    for run in runs_of(series):
        calm = _calm(beside or series, range(len(beside)) if beside else run)
        watches = (ScaleWatch(calm=calm), ScaleWatch(calm=calm, factor=_FALL_IN_ALL, patient=True))
        highest, before, same = 0.0, 0.0, 0
        for index in _held(series, run, beside) if beside else _moving(series, run, calm + 2):
            scale = series.values[index]
            same, before = (same + 1 if scale == before else 0), scale
            if same > calm:
                continue  # it is settled, and one more entry tells the watches nothing
            for watch in watches:
                message = watch.accept(scale)
                if message:
                    return series[index], message
            if 0.0 < scale <= 1.0 and highest >= _ONCE:
                return series[index], (
                    f"the loss scale fell from {name_of(highest)} to {name_of(scale)}: "
                    "gradients overflow at any scale"
                )
            highest = max(highest, scale) if scale == scale else highest
    return None


def _beside(series: MetricSeries, log: Log | None) -> MetricSeries | None:
    """Returns the loss that is written more often than the scale; None if there is none."""
    if log is None or len(series.lines) != len(series):
        return None
    longer = [
        loss
        for loss in main_losses(log)
        if len(loss) > _OFTEN * len(series)
        and len(loss.lines) == len(loss)
        and loss.rank in (None, series.rank)
    ]
    return max(longer, key=len, default=None)


def _moving(series: MetricSeries, run: range, most: int) -> Iterator[int]:
    """Yields the first entries of each stretch in which the scale stays the same."""
    at = run.start
    for _, stretch in groupby(series.values[run.start : run.stop]):
        count = sum(1 for _ in stretch)
        yield from range(at, at + min(count, most))
        at += count


def _held(series: MetricSeries, run: range, beside: MetricSeries) -> Iterator[int]:
    """Yields which scale held on each line of the log, that before its first fall included."""
    lines = beside.lines
    at = bisect_right(lines, series.lines[run.start]) if run.start else 0
    for index in run:
        while at < len(lines) and lines[at] <= series.lines[index]:
            if lines[at] < series.lines[index]:
                yield max(run.start, index - 1)
            at += 1
        yield index


def _calm(series: MetricSeries, run: range) -> int:
    """Returns how many entries make the scaler's settled steps, where not every step is logged."""
    if len(series.steps) != len(series) or len(run) < 2:
        return _SETTLED_ENTRIES
    stride = max(1, (series.steps[run[-1]] - series.steps[run[0]]) // (len(run) - 1))
    return max(3, _SETTLED_ENTRIES // stride)
