"""The one model of a log: series of numbers in columns, and how rows become series."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nanguard.check.log.quantities import Metric, Quantity
    from nanguard.errors import SourceError

# How many series a log may have; the names in a hostile one may never end.
MOST_SERIES = 512
MOST_NOTES = 10_000
MOST_BAD_LINES = 10_000
# Places of numbers that are not finite that are kept; a long run may go on with NaN for ever.
MOST_BAD = 100_000
_LARGEST_FLOAT32 = 3.4e38
_LONG_SERIES = 20_000


@dataclass(frozen=True, slots=True)
class LogPoint:
    """One number of a log and its place; what the log does not say is None."""

    index: int
    value: float
    step: int | None
    epoch: float | None
    line: int | None


class SeriesColumn:
    """Whole numbers, kept as ranges where they are regular: steps and lines mostly are."""

    def __init__(self) -> None:
        self._blocks: list[Sequence[int]] = []
        self._starts: list[int] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        at = bisect_right(self._starts, index) - 1
        return self._blocks[at][index - self._starts[at]]

    def __iter__(self) -> Iterator[int]:
        for block in self._blocks:
            yield from block

    def extend(self, values: Sequence[int]) -> None:
        """Adds values, which are shared, not copied, if they are compact already."""
        if not values:
            return
        last = self._blocks[-1] if self._blocks else None
        if isinstance(values, range) and isinstance(last, range) and _continues(last, values):
            self._blocks[-1] = range(last[0], values[-1] + _sign(values), values.step)
        else:
            self._starts.append(self._length)
            self._blocks.append(values)
        self._length += len(values)

    def extend_by(self, other: SeriesColumn, start: int = 0) -> None:
        """Adds the values of another column from an index on."""
        for first, block in zip(other._starts, other._blocks, strict=True):
            if first + len(block) > start:
                self.extend(block[max(0, start - first) :])

    def falls(self) -> Iterator[int]:
        """Yields where a value is less than the one before it."""
        for start, block in zip(self._starts, self._blocks, strict=True):
            if start and block[0] < self[start - 1]:
                yield start
            if isinstance(block, range) and block.step > 0:
                continue
            for index in range(1, len(block)):
                if block[index] < block[index - 1]:
                    yield start + index

    def restarts(self) -> Iterator[int]:
        """Yields where a value is less than half of the one before it."""
        for start, block in zip(self._starts, self._blocks, strict=True):
            if start and block[0] < self[start - 1] / 2:
                yield start
            if isinstance(block, range) and block.step > 0:
                continue
            for index in range(1, len(block)):
                if block[index] < block[index - 1] / 2:
                    yield start + index


def compact(values: Sequence[int]) -> Sequence[int]:
    """Returns the same values as a range, or in as few bytes as they need."""
    if isinstance(values, range) or not values:
        return values
    stride = values[1] - values[0] if len(values) > 1 else 1
    if stride:
        regular = range(values[0], values[-1] + (1 if stride > 0 else -1), stride)
        if len(regular) == len(values) and array("q", regular) == _whole(values):
            return regular
    low, high = min(values), max(values)
    return array("I" if low >= 0 and high < 2**32 else "q", values)


def _whole(values: Sequence[int]) -> array[int]:
    exact = isinstance(values, array) and values.typecode == "q"
    return values if exact else array("q", values)  # type: ignore[return-value]


def _continues(first: range, then: range) -> bool:
    return first.step == then.step and then[0] - first[-1] == first.step


def _sign(values: range) -> int:
    return 1 if values.step > 0 else -1


@dataclass(slots=True)
class MetricSeries:
    """One metric over a run.

    Attributes:
        metric: What it is.
        label: What it was measured on or for, where the log names it (a data set, say).
        rank: The rank that wrote it, where the log names it.
        values: The numbers, as the log has them; single precision where that holds them.
        steps: Their steps; empty if the log has none.
        epochs: Their epochs; empty if the log has none.
        lines: Their lines, counted from 1; empty for a log without lines.
    """

    metric: Metric
    label: str = ""
    rank: int | None = None
    values: array[float] = field(default_factory=lambda: array("f"))
    steps: SeriesColumn = field(default_factory=SeriesColumn)
    epochs: array[float] = field(default_factory=lambda: array("f"))
    lines: SeriesColumn = field(default_factory=SeriesColumn)
    _bad: tuple[int, list[int]] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> LogPoint:
        count = len(self.values)
        if index < 0:
            index += count
        return LogPoint(
            index,
            self.values[index],
            self.steps[index] if len(self.steps) == count else None,
            self.epochs[index] if len(self.epochs) == count else None,
            self.lines[index] if len(self.lines) == count else None,
        )

    @property
    def role(self) -> Quantity:
        """What the numbers are."""
        return self.metric.role

    @property
    def name(self) -> str:
        """The name, with what it was measured on."""
        return f"{self.label} {self.metric.name}" if self.label else self.metric.name

    def bad(self) -> list[int]:
        """Returns where the numbers are not finite: the first places, up to the limit."""
        if self._bad is None or self._bad[0] != len(self.values):
            self._bad = (len(self.values), _not_finite(self.values))
        return self._bad[1]

    def extend(
        self,
        values: Sequence[float],
        steps: Sequence[int] | None,
        epochs: Sequence[float] | None,
        lines: Sequence[int] | None,
    ) -> None:
        """Adds values and their places; a place that is missing once is missing for good."""
        before = len(self.values)
        self._add_values(values)
        if steps is not None and len(self.steps) == before:
            self.steps.extend(steps)
        if epochs is not None and len(self.epochs) == before:
            self.epochs.extend(array("f", epochs))
        if lines is not None and len(self.lines) == before:
            self.lines.extend(lines)

    def extend_by(self, later: MetricSeries, start: int = 0) -> None:
        """Adds the numbers of another series from an index on.

        Lines that begin anew are those of another file, and are dropped with the ones before.
        """
        before, count = len(self), len(later)
        self._add_values(later.values[start:])
        if len(self.steps) == before and len(later.steps) == count:
            self.steps.extend_by(later.steps, start)
        if len(self.epochs) == before and len(later.epochs) == count:
            self.epochs.extend(later.epochs[start:])
        anew = before and count > start and _begin_anew(self.lines, later.lines, start)
        if len(self.lines) == before and len(later.lines) == count and not anew:
            self.lines.extend_by(later.lines, start)

    def _add_values(self, values: Sequence[float]) -> None:
        if self.values.typecode == "f":
            is_narrow = isinstance(values, array) and values.typecode == "f"
            narrow = values if is_narrow else array("f", values)
            # What is too large for single precision becomes infinite, and so does the sum.
            if (
                is_narrow
                or math.isfinite(sum(narrow))
                or not any(
                    math.isfinite(value) and abs(value) > _LARGEST_FLOAT32 for value in values
                )
            ):
                self.values.extend(narrow)
                return
            self.values = array("d", self.values)
        self.values.extend(array("d", values))


def _begin_anew(before: SeriesColumn, after: SeriesColumn, start: int) -> bool:
    known = len(before) and len(after) > start
    return bool(known) and after[start] <= before[len(before) - 1]


def _not_finite(values: array[float]) -> list[int]:
    # One sum tells for most logs that there is nothing to look for.
    if math.isfinite(sum(values)):
        return []
    if len(values) > _LONG_SERIES:
        try:
            import numpy as np
        except ImportError:
            pass
        else:
            seen = np.frombuffer(values, np.float32 if values.typecode == "f" else np.float64)
            return [int(i) for i in np.flatnonzero(~np.isfinite(seen))[:MOST_BAD]]
    found = (index for index, value in enumerate(values) if not math.isfinite(value))
    return list(islice(found, MOST_BAD))


@dataclass(frozen=True, slots=True)
class Note:
    """A line that says in words that something went wrong.

    Attributes:
        role: What it speaks of: the loss, the gradient norm or the loss scale.
        said: The words.
        step: The step it names, or the last one named before.
        line: Its line, counted from 1.
    """

    role: Quantity
    said: str
    step: int | None
    line: int | None


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that cannot be read, or only in part.

    Attributes:
        line: Its line, counted from 1.
        what: What is wrong with it; the same words for the same damage.
        path: Its file, where that is not the log's own.
    """

    line: int
    what: str
    path: str = ""


@dataclass(slots=True)
class Log:
    """What one log says.

    Attributes:
        path: The file or folder.
        series: The metrics, in the order in which they first appear.
        notes: What it says in words.
        problem: Why the log could not be read to its end, if so.
        sparse: Whether NaN may stand for "not measured" in this format.
        bad_lines: Lines that cannot be read.
    """

    path: str
    series: list[MetricSeries] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    problem: SourceError | None = None
    sparse: bool = False
    bad_lines: list[BadLine] = field(default_factory=list)

    @property
    def read_from(self) -> list[str]:
        """The file or folder."""
        return [self.path]

    @property
    def not_read(self) -> list[tuple[str, str]]:
        """Why it could not be read to its end, if so."""
        return [] if self.problem is None else [(self.path, self.problem.reason)]

    def extend(self, later: Log) -> None:
        """Adds what the same log said later, and may keep parts of it."""
        own = {(s.metric.key, s.label, s.rank): s for s in self.series}
        for series in later.series:
            key = (series.metric.key, series.label, series.rank)
            if key in own:
                own[key].extend_by(series)
            elif len(self.series) < MOST_SERIES:
                own[key] = series
                self.series.append(series)
        self.notes += later.notes[: MOST_NOTES - len(self.notes)]
        self.problem = self.problem or later.problem
        self.sparse = self.sparse or later.sparse
        self.add_bad_lines(later.bad_lines)

    def add_bad_lines(self, bad: Sequence[BadLine]) -> None:
        """Takes note of lines that cannot be read; of a flood of them, the first ones."""
        self.bad_lines += bad[: MOST_BAD_LINES - len(self.bad_lines)]

    def of(self, role: Quantity) -> list[MetricSeries]:
        """Returns the series of one role."""
        return [series for series in self.series if series.role is role]


# Steps beyond this are no steps.
_MOST_STEP = 2**62


@dataclass(frozen=True, slots=True)
class Which:
    """Which series a number belongs to."""

    metric: Metric
    label: str = ""
    rank: int | None = None


@dataclass(slots=True)
class LogRows:
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
        # Those that were taken before as well: names without end must not crowd them out later.
        self._admitted: set[tuple[str, str, int | None]] = set()
        self._step: float | None = None
        self._epoch: float | None = None

    def add(
        self,
        stretch: list[LogRows],
        notes: Sequence[Note] = (),
        pieces: Pieces | None = None,
        bad: Sequence[BadLine] = (),
    ) -> None:
        """Adds the rows and notes of a stretch, in any order.

        Args:
            stretch: The rows.
            notes: The notes.
            pieces: Where carriage returns cut lines into pieces, the line of each.
            bad: Lines that cannot be read.
        """
        if pieces is not None:
            bad = [BadLine(pieces.line(one.line), one.what) for one in bad]
        self.log.add_bad_lines(bad)
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

    def take(self) -> Log:
        """Returns what was gathered since the last time, and begins a log that goes on from it."""
        taken, self.log = self.log, Log(self.log.path, sparse=self.log.sparse)
        self._series = {}
        return taken

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

    def _add_columns(self, stretch: list[LogRows], pieces: Pieces | None) -> None:
        # A metric may be written in two ways, "Train Loss" and "train_loss", in rows of two kinds.
        parts: dict[tuple[str, str, int | None], list[tuple[Which, LogRows]]] = {}
        for rows in stretch:
            for which in rows.columns:
                parts.setdefault(_key(which), []).append((which, rows))
        for having in parts.values():
            which, rows = having[0]
            series = self._of(which)
            if series is None:
                continue
            if len(having) == 1:
                lines = _lines(rows.lines, pieces)
                series.extend(rows.columns[which], rows.steps, rows.epochs, lines)
            else:
                _extend_merged(series, having, pieces)

    def _of(self, which: Which) -> MetricSeries | None:
        key = _key(which)
        series = self._series.get(key)
        if series is None and (key in self._admitted or len(self._admitted) < MOST_SERIES):
            self._admitted.add(key)
            series = MetricSeries(which.metric, which.label, which.rank)
            self._series[key] = series
            self.log.series.append(series)
        return series


def _key(which: Which) -> tuple[str, str, int | None]:
    return which.metric.key, which.label, which.rank


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
    series: MetricSeries, having: list[tuple[Which, LogRows]], pieces: Pieces | None
) -> None:
    """Adds rows of several kinds in the order of their lines."""
    values = [rows.columns[which] for which, rows in having]
    places = sorted(
        (rows.lines[i] if rows.lines else 0, part, i)
        for part, (_, rows) in enumerate(having)
        for i in range(len(values[part]))
    )
    steps = [rows.steps for _, rows in having if rows.steps is not None]
    epochs = [rows.epochs for _, rows in having if rows.epochs is not None]
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
