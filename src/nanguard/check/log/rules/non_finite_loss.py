"""LOG001: a loss that is NaN or Inf."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from nanguard.check.log.log_rule import LogRule, first_bad_loss, history_of, place, same_row
from nanguard.check.log.quantities import Quantity
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Severity, name_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.log.series import Log, LogPoint, MetricSeries
    from nanguard.findings import Finding

_MOST_TERMS = 6


class NonFiniteLoss(LogRule):
    """A loss in the log is NaN or infinite.

    Why it breaks a run: one backward pass through such a loss makes every gradient NaN, and the
    next optimizer step makes every weight NaN. What the run writes afterwards is worth nothing,
    and many runs go on for days before someone looks.

    Go back to a checkpoint from before the first bad step, and find what that step was fed: the
    finding names it, the last healthy one, and what moved in between.
    """

    code = "LOG001"
    name = "non-finite-loss"
    severity = Severity.ERROR
    seen_in = "https://github.com/karpathy/nanoGPT/issues/167"
    examples = (
        Passes(
            "info: nano model, inference in bf16\nbest_val_loss = inf\n"
            "iter 0: loss 2.31, number of nan iterations: 0\niter 1: loss 2.29\n",
            "train.log",
        ),
        Passes("step,train_loss,val_loss\n1,2.0,\n2,1.9,1.8\n", "metrics.csv"),
        Fails(
            "step 1 | loss: 2.31\nstep 2 | loss: 2.29\nstep 3 | loss: nan\nstep 4 | loss: nan\n",
            line=3,
            file="train.log",
        ),
        Fails('{"step": 1, "loss": 0.7}\n{"step": 2, "loss": Infinity}\n', 2, "metrics.jsonl"),
    )

    def check(self, source: Log) -> Iterator[Finding]:
        """Yields the first bad loss of training, and of evaluation where that was bad before."""
        bad = [
            (series, point)
            for series in source.of(Quantity.LOSS)
            if (point := first_bad_loss(source, series)) is not None
        ]
        training = _first([pair for pair in bad if not pair[0].metric.evaluation])
        evaluation = _first([pair for pair in bad if pair[0].metric.evaluation])
        if training:
            yield self._told(source, training, bad)
        if evaluation and not (training and _order(training[1]) <= _order(evaluation[1])):
            yield self._told(source, evaluation, bad)
        if not bad:
            yield from self._from_notes(source)

    def _told(
        self,
        log: Log,
        worst: tuple[MetricSeries, LogPoint],
        bad: list[tuple[MetricSeries, LogPoint]],
    ) -> Finding:
        series, point = worst
        count = len(series.bad())
        message = f"{series.name} is {name_of(point.value)} at {place(point)}"
        if count > 1:
            message += f" ({count} of {len(series)} values are not finite)"
        others = [s.name for s, _ in bad if s is not series]
        if others:
            more = ", ..." if len(others) > _MOST_TERMS else ""
            message += f", also not finite: {', '.join(others[:_MOST_TERMS])}{more}"
        fine = [
            f"{term.name} {name_of(row.value)}"
            for term in log.of(Quantity.LOSS)
            if term is not series and (row := same_row(term, point)) and math.isfinite(row.value)
        ]
        if fine:
            message += f", while {', '.join(fine[:_MOST_TERMS])}"
        return self.at(log, series, point, f"{message}; {history_of(log, series, point)}")

    def _from_notes(self, log: Log) -> Iterator[Finding]:
        notes = [note for note in log.notes if note.role is Quantity.LOSS]
        if notes:
            at = "" if notes[0].step is None else f" at step {notes[0].step}"
            yield self.finding(
                f"the log says{at}: {notes[0].said}",
                path=log.path,
                line=notes[0].line,
                where="loss",
                step=notes[0].step,
            )


def _order(point: LogPoint) -> float:
    first = next((v for v in (point.line, point.step, point.epoch) if v is not None), None)
    return point.index if first is None else first


def _first(pairs: list[tuple[MetricSeries, LogPoint]]) -> tuple[MetricSeries, LogPoint] | None:
    return min(pairs, key=lambda pair: (_order(pair[1]), not pair[0].metric.plain), default=None)
