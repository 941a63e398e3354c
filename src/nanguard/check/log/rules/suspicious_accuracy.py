"""LOG008: an accuracy that was computed from NaN predictions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from nanguard.check.log.log_rule import LogRule, first_bad_loss, place, point_text, same_row
from nanguard.check.log.quantities import Quantity
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Severity, name_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.log.series import Log, LogPoint, MetricSeries
    from nanguard.findings import Finding

_PERFECT = 0.9995
# How much an accuracy has to jump with the first NaN to be no accident.
_JUMP = 0.1
# Bad losses that are compared with the accuracy beside them.
_MOST_LOSSES_COMPARED = 2000


class SuspiciousAccuracy(LogRule):
    """The accuracy is perfect, or jumps up, on the very line on which the loss is NaN.

    Why it breaks a run: argmax over NaN returns an index like any other, so an accuracy comes out,
    and on padded, masked or sorted labels it comes out as 1.0. It is chosen as the best epoch, and
    the checkpoint that is kept is the broken one.

    Treat every metric of a step with a non-finite loss as not measured.
    """

    code = "LOG008"
    name = "suspicious-accuracy"
    severity = Severity.WARNING
    seen_in = "https://github.com/keras-team/keras/issues/14215"
    examples = (
        Passes(
            "epoch,train_loss,val_loss,val_acc\n1,0.9,0.8,0.7\n2,0.01,0.02,1.0\n", "history.csv"
        ),
        Fails(
            "Epoch 1/3 | Train Loss: 0.81 | Val Loss: 0.79 | Val Acc: 0.6500\n"
            "Epoch 2/3 | Train Loss: 0.77 | Val Loss: nan | Val Acc: 1.0000\n",
            line=2,
            file="train.log",
        ),
    )

    def check(self, source: Log) -> Iterator[Finding]:
        """Yields the first accuracy that cannot be one."""
        for accuracy in source.of(Quantity.ACCURACY):
            for loss in _losses_of(source, accuracy):
                found = _beside(loss, accuracy)
                if found is not None:
                    row, bad = found
                    message = (
                        f"{accuracy.name} is {name_of(row.value)} at {place(row)}, where "
                        f"{loss.name} is {name_of(bad.value)}: it was computed from predictions "
                        "that are not finite"
                    )
                    before = accuracy[row.index - 1] if row.index else None
                    message += f" (before: {point_text(before)})" if before else ""
                    yield self.at(source, accuracy, row, message)
                    return


def _losses_of(log: Log, accuracy: MetricSeries) -> list[MetricSeries]:
    """Returns the bad losses of the same phase, or of any phase if it has none of its own."""
    losses = [
        s for s in log.of(Quantity.LOSS) if s.rank == accuracy.rank and s.label == accuracy.label
    ]
    own = [s for s in losses if s.metric.evaluation == accuracy.metric.evaluation] or losses
    return [series for series in own if first_bad_loss(log, series) is not None]


def _beside(loss: MetricSeries, accuracy: MetricSeries) -> tuple[LogPoint, LogPoint] | None:
    top = 100.0 if max((v for v in accuracy.values if v == v), default=0.0) > 1.5 else 1.0
    for index in loss.bad()[:_MOST_LOSSES_COMPARED]:
        bad = loss[index]
        row = same_row(accuracy, bad) if math.isnan(bad.value) else None
        if row is None:
            continue
        jump = row.index > 0 and row.value - accuracy.values[row.index - 1] >= _JUMP * top
        if row.value >= _PERFECT * top or jump:
            return row, bad
    return None
