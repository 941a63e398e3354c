"""LOG007: a loss of 0.0, or one that stands still, while the gradients are NaN."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from nanguard.check.log.log_rule import (
    LogRule,
    first_bad_loss,
    first_bad_norm,
    history_of,
    last_at,
    main_losses,
    place,
    same_row,
)
from nanguard.check.log.quantities import Quantity
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Severity, name_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.log.series import Log, LogPoint, MetricSeries
    from nanguard.findings import Finding

# Equal losses in a row that are no accident.
_FROZEN = 3
# Zeros up to the end of a log, right after a loss that was nowhere near zero.
_ZEROS = 5
# Bad norms that are compared with the loss beside them.
_MOST_NORMS_COMPARED = 2000


class HiddenNan(LogRule):
    """The loss reads 0.0, or always the same, while the gradients are not finite.

    Why it breaks a run: the trainer replaced a NaN loss by zero or by the last good one
    (``logging_nan_inf_filter`` does), or a guard zeroes NaN gradients so that nothing is trained
    any more. The curve looks calm, the weights are lost or stand still, and the run goes on.

    Go back to a checkpoint from before the named step. Turn the filter off, so that the log says
    what happened.
    """

    code = "LOG007"
    name = "hidden-nan"
    severity = Severity.ERROR
    seen_in = "https://github.com/AnswerDotAI/ModernBERT/issues/233"
    examples = (
        Passes(
            "".join(f"step {n} loss {max(0.0, 1 - n / 9):.1f} grad_norm 0.1\n" for n in range(20)),
            "train.log",
        ),
        Fails(
            "{'loss': 2.1, 'grad_norm': 0.9, 'epoch': 0.1}\n"
            "{'loss': 0.0, 'grad_norm': nan, 'epoch': 0.2}\n"
            "{'loss': 0.0, 'grad_norm': nan, 'epoch': 0.3}\n",
            line=2,
            file="train.log",
        ),
    )

    def check(self, source: Log) -> Iterator[Finding]:
        """Yields the first loss that hides a NaN."""
        for loss in main_losses(source):
            found = (
                _beside_bad_norms(source, loss)
                or _beside_notes(source, loss)
                or _zero_for_good(source, loss)
            )
            if found is not None:
                point, why = found
                message = (
                    f"{loss.name} reads {name_of(point.value)} at {place(point)} {why}; "
                    f"{history_of(source, loss, point)}"
                )
                yield self.at(source, loss, point, message)
                return


def _beside_bad_norms(log: Log, loss: MetricSeries) -> tuple[LogPoint, str] | None:
    for norms in log.of(Quantity.GRAD_NORM):
        if norms.rank != loss.rank or first_bad_norm(log, norms) is None:
            continue
        rows = [
            (i, row)
            for i in norms.bad()[:_MOST_NORMS_COMPARED]
            if (row := same_row(loss, norms[i])) is not None
        ]
        for number, (index, row) in enumerate(rows):
            frozen = rows[number : number + _FROZEN]
            zero = row.value == 0.0 and _was_more(loss, row.index)
            still = len(frozen) == _FROZEN and len({r.value for _, r in frozen}) == 1
            if math.isfinite(row.value) and (zero or (still and row.value != 0.0)):
                count = sum(later.value == row.value for _, later in rows[number:])
                bad = name_of(norms.values[index])
                return row, f"while {norms.name} is {bad} ({count} such entries)"
    return None


def _beside_notes(log: Log, loss: MetricSeries) -> tuple[LogPoint, str] | None:
    """Returns where a loss stands still while the log says that the gradients are not finite."""
    lines = [note.line for note in log.notes if note.role is Quantity.GRAD_NORM and note.line]
    if len(lines) < _FROZEN or len(loss.lines) != len(loss):
        return None
    # The loss of the step that is spoken of may stand before the words or after them.
    begin = last_at(loss, "line", lines[0])
    end = last_at(loss, "line", lines[-1])
    if begin is None or end is None:
        return None
    values = loss.values
    for index in range(begin, min(end, len(values) - _FROZEN, begin + _MOST_NORMS_COMPARED)):
        if len(set(values[index : index + _FROZEN])) == 1 and _was_more(loss, index):
            return loss[index], f"while the log speaks of bad gradients ({len(lines)} times)"
    return None


def _was_more(loss: MetricSeries, index: int) -> bool:
    before = [v for v in loss.values[max(0, index - 16) : index] if math.isfinite(v)]
    return not before or any(v != 0.0 for v in loss.values[:index][-1000:])


def _zero_for_good(log: Log, loss: MetricSeries) -> tuple[LogPoint, str] | None:
    """Returns where a loss dropped to exactly 0 in one entry and stayed there."""
    values = loss.values
    end = len(values)
    first = end
    while first and values[first - 1] == 0.0:
        first -= 1
    before = [v for v in values[max(0, first - 16) : first] if math.isfinite(v)]
    if first == end or len(before) < _ZEROS:
        return None
    evaluated = [s for s in log.of(Quantity.LOSS) if s.metric.evaluation]
    nan_beside = any(first_bad_loss(log, series) is not None for series in evaluated)
    if any(not norms.bad() for norms in log.of(Quantity.GRAD_NORM)) and not nan_beside:
        return None
    sudden = min(before[-_ZEROS:]) > 0.2 * max(values[: min(first, 100)]) > 0.0
    if sudden and (nan_beside or end - first >= _ZEROS):
        beside = " while the evaluation loss is not finite" if nan_beside else ""
        return loss[first], f"and stays there for {end - first} entries{beside}"
    return None
