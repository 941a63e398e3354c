"""Gathers rows into series, a stretch of a log at a time."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nanguard.check.log.series import MOST_NOTES, MOST_SERIES, Log, MetricSeries, Note, compact

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nanguard.check.log.names import Metric

# Steps beyond this are no steps.
_MOST_STEP = 2**62


@dataclass(frozen=True, slots=True)
class Which:
    """Which series a number belongs to."""

    metric: Metric
    label: str = ""
    rank: int | None = None


@dataclass(slots=True)
class Rows:
    """Rows with the same columns.

    Attributes:
        lines: Their lines, or their pieces of lines; None for a log without lines.
        steps: Their steps; None if they name none.
        epochs: Their epochs; None if they name none.
        columns: The numbers of each series.
    """

    lines: Sequence[int] | None
    steps: Sequence[int] | None = None
    epochs: Sequence[float] | None = None
    columns: dict[Which, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pieces:
    """The lines that pieces of lines belong to, where carriage returns cut them.

    Attributes:
        first: The number of the first piece.
        lines: The line of each piece.
    """

    first: int
    lines: Sequence[int]

    def line(self, piece: int) -> int:
        """Returns the line of a piece."""
        return self.lines[piece - self.first]


@dataclass(slots=True)
class _Known:
    """Where in a stretch a step or an epoch is named, to be handed to the rows after it."""

    lines: list[int]
    values: list[float]

    def at(self, line: int, before: float | None) -> float | None:
        index = bisect_right(self.lines, line) - 1
        return self.values[index] if index >= 0 else before


class Gathering:
    """Makes a log from stretches of rows.

    A row that names no step belongs to the step that was named last.

    Attributes:
        log: What was gathered so far.
    """

    def __init__(self, path: str) -> None:
        self.log = Log(path)
        self._series: dict[tuple[str, str, int | None], MetricSeries] = {}
        self._step: float | None = None
        self._epoch: float | None = None

    def add(
        self, stretch: list[Rows], notes: Sequence[Note] = (), pieces: Pieces | None = None
    ) -> None:
        """Adds the rows and notes of a stretch, in any order.

        Args:
            stretch: The rows.
            notes: The notes.
            pieces: Where carriage returns cut lines into pieces, the line of each.
        """
        steps = _known([(rows.lines, rows.steps) for rows in stretch])
        epochs = _known([(rows.lines, rows.epochs) for rows in stretch])
        self._add_notes(notes, steps, pieces)
        for rows in stretch:
            if rows.steps is None:
                filled = _filled(rows.lines, steps, self._step)
                rows.steps = None if filled is None else array("q", map(int, filled))
            if rows.epochs is None:
                rows.epochs = _filled(rows.lines, epochs, self._epoch)
            if rows.steps is not None:
                rows.steps = compact(rows.steps)
            if rows.lines is not None:
                rows.lines = compact(rows.lines)
        self._add_columns(stretch, pieces)
        self._step = steps.values[-1] if steps and steps.values else self._step
        self._epoch = epochs.values[-1] if epochs and epochs.values else self._epoch

    def _add_notes(
        self, notes: Sequence[Note], steps: _Known | None, pieces: Pieces | None
    ) -> None:
        for note in notes:
            if len(self.log.notes) >= MOST_NOTES:
                return
            step: float | None = note.step
            if step is None:
                step = steps.at(note.line or 0, self._step) if steps else self._step
            whole = None if step is None else int(step)
            line = note.line if pieces is None or note.line is None else pieces.line(note.line)
            self.log.notes.append(Note(note.role, note.said, whole, line))

    def _add_columns(self, stretch: list[Rows], pieces: Pieces | None) -> None:
        parts: dict[Which, list[Rows]] = {}
        for rows in stretch:
            for which in rows.columns:
                parts.setdefault(which, []).append(rows)
        for which, having in parts.items():
            series = self._of(which)
            if series is None:
                continue
            if len(having) == 1:
                rows = having[0]
                lines = _lines(rows.lines, pieces)
                series.extend(rows.columns[which], rows.steps, rows.epochs, lines)
            else:
                _extend_merged(series, which, having, pieces)

    def _of(self, which: Which) -> MetricSeries | None:
        key = (which.metric.key, which.label, which.rank)
        series = self._series.get(key)
        if series is None and len(self._series) < MOST_SERIES:
            series = MetricSeries(which.metric, which.label, which.rank)
            self._series[key] = series
            self.log.series.append(series)
        return series


def _known(parts: list[tuple[Sequence[int] | None, Sequence[float] | None]]) -> _Known | None:
    """Returns where a value is named; None if no row asks for it, to save the sorting."""
    if all(values is not None for _, values in parts):
        last = max(
            ((lines[-1], values[-1]) for lines, values in parts if lines and values),
            default=None,
        )
        return None if last is None else _Known([last[0]], [last[1]])
    pairs = sorted(
        pair
        for lines, values in parts
        if lines and values
        for pair in zip(lines, values, strict=False)
    )
    return _Known([line for line, _ in pairs], [value for _, value in pairs])


def _filled(
    lines: Sequence[int] | None, known: _Known | None, before: float | None
) -> array[float] | None:
    if lines is None or known is None or (not known.lines and before is None):
        return None
    values = [known.at(line, before) for line in lines]
    return array("d", values) if None not in values else None  # type: ignore[arg-type]


def _extend_merged(
    series: MetricSeries, which: Which, having: list[Rows], pieces: Pieces | None
) -> None:
    """Adds rows of several kinds in the order of their lines."""
    values = [rows.columns[which] for rows in having]
    places = sorted(
        (rows.lines[i] if rows.lines else 0, part, i)
        for part, rows in enumerate(having)
        for i in range(len(values[part]))
    )
    steps = [rows.steps for rows in having if rows.steps is not None]
    epochs = [rows.epochs for rows in having if rows.epochs is not None]
    series.extend(
        array("d", [values[part][i] for _, part, i in places]),
        compact([steps[part][i] for _, part, i in places]) if len(steps) == len(having) else None,
        array("d", [epochs[part][i] for _, part, i in places])
        if len(epochs) == len(having)
        else None,
        _lines(compact([line for line, _, _ in places]), pieces),
    )


def _lines(lines: Sequence[int] | None, pieces: Pieces | None) -> Sequence[int] | None:
    if lines is None or pieces is None:
        return lines
    return compact([pieces.line(piece) for piece in lines])


def whole(value: float) -> int | None:
    """Returns a step as a whole number; None if it is none."""
    return int(value) if value == value and abs(value) < _MOST_STEP else None
