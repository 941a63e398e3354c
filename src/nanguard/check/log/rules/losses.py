"""Losses of a run that are not finite, that climb back, or that never moved."""

from __future__ import annotations

import math
from statistics import fmean, median, pstdev
from typing import TYPE_CHECKING

from nanguard.check.log.log_rule import (
    LogRule,
    drift_of,
    explosion_of,
    first_bad_loss,
    first_bad_norm,
    history_of,
    is_game,
    main_losses,
    main_norms,
    moved_before,
    place,
    same_row,
    training_losses,
)
from nanguard.check.log.quantities import Quantity
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Severity, name_of

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterator, Sequence

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


def _turning(epochs: int, turn: int) -> str:
    """Returns a history whose loss falls, and rises from an epoch on."""
    rows = [
        2.0 * 0.9**n if n < turn else 2.0 * 0.9**turn + 0.3 * (n - turn + 1) for n in range(epochs)
    ]
    return "epoch,train_loss\n" + "".join(f"{n},{loss:.4f}\n" for n, loss in enumerate(rows, 1))


class DivergingLoss(LogRule):
    """The training loss rises steadily and gives back most of what it had gained.

    Why it breaks a run: a loss that climbs for long ends in Inf, or in a model worse than an
    untrained one. The usual reasons are a learning rate that is too high for this phase, and Adam
    moments that no longer fit the gradients.

    Go back to the checkpoint with the lowest loss and halve the learning rate. Losses that play
    against each other (GANs, reinforcement learning) may rise: they are only reported when they
    multiply up to the end of the log. Validation losses are left alone.
    """

    code = "LOG005"
    name = "diverging-loss"
    severity = Severity.WARNING
    seen_in = "https://github.com/keras-team/keras/issues/21"
    examples = (
        Passes(_turning(24, 24), "history.csv"),
        Fails(_turning(24, 12), file="history.csv"),
    )

    def check(self, source: Log) -> Iterator[Finding]:
        """Yields one finding for the first training loss that diverges."""
        game = is_game(source)
        for series in training_losses(source) if game else main_losses(source):
            found = explosion_of(series) if game else drift_of(series)
            if found is None:
                continue
            point, message = found
            moved = moved_before(source, series, point)
            more = f"; before, {' and '.join(moved)}" if moved else ""
            yield self.at(source, series, point, f"since {place(point)}, {message}{more}")
            return


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
