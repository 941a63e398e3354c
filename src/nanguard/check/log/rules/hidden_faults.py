"""What a log hides: NaN behind a loss of 0 or an accuracy, and lines that cannot be read."""

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
    point_text,
    same_row,
)
from nanguard.check.log.quantities import Quantity
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Severity, name_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.log.series import BadLine, Log, LogPoint, MetricSeries
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


class UnreadableLine(LogRule):
    """A line is not complete JSON, a row lacks cells, or bytes are zero or broken.

    All other lines are read and judged. A last line that has no end is left alone: it may still be
    being written. So are lines of plain text between lines of JSON, unless the file is a .jsonl.

    Why it breaks a run: it does not, but the number that went bad may stand on that very line. A
    disk that was full, a machine that went down and two processes that write to one file leave
    such lines, and all three harm checkpoints as well.

    Look at the line, and at what happened on the machine at that time.
    """

    code = "LOG010"
    name = "unreadable-line"
    severity = Severity.WARNING
    seen_in = "https://github.com/dbolya/yolact/issues/710"
    examples = (
        Passes('{"step": 1, "loss": 2.0}\nloading\n{"step": 2, "loss": 1.9}\n{"st', "train.log"),
        Passes("step,loss,acc\n1,2.0,\n2,1.9,0.5\n3,1.8", "metrics.csv"),
        Fails(
            '{"step": 1, "loss": 2.0}\n{"step": 2, "lo\n{"step": 3, "loss": 1.9}\n',
            line=2,
            file="metrics.jsonl",
        ),
        Fails("step,loss,acc\n1,2.0,0.4\n2,1.9\n3,1.8,0.6\n", line=3, file="metrics.csv"),
        Fails("step 1 loss 2.0\n\0\0\0\0step 2 loss 1.9\nstep 3 loss 1.8\n", 2, "train.log"),
    )

    def check(self, source: Log) -> Iterator[Finding]:
        """Yields one finding for each kind of damage, at its first line."""
        kinds: dict[tuple[str, str], list[BadLine]] = {}
        for bad in source.bad_lines:
            kinds.setdefault((bad.path, bad.what), []).append(bad)
        for (path, what), lines in kinds.items():
            more = f" ({len(lines)} such lines)" if len(lines) > 1 else ""
            said = f"line {lines[0].line} cannot be read: {what}{more}"
            yield self.finding(said, path=path or source.path, line=lines[0].line, where="line")
