"""The one model of a log: series of numbers in columns, each with its step, epoch and line."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nanguard.check.log.names import Metric, Role
    from nanguard.errors import SourceError

# How many series a log may have; the names in a hostile one may never end.
MOST_SERIES = 512
MOST_NOTES = 10_000
# Places of numbers that are not finite that are kept; a long run may go on with NaN for ever.
MOST_BAD = 100_000
_LARGEST = 3.4e38
_LONG = 20_000


@dataclass(frozen=True, slots=True)
class Point:
    """One number of a log and its place; what the log does not say is None."""

    index: int
    value: float
    step: int | None
    epoch: float | None
    line: int | None


class Column:
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
    steps: Column = field(default_factory=Column)
    epochs: array[float] = field(default_factory=lambda: array("f"))
    lines: Column = field(default_factory=Column)
    _bad: tuple[int, list[int]] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Point:
        count = len(self.values)
        if index < 0:
            index += count
        return Point(
            index,
            self.values[index],
            self.steps[index] if len(self.steps) == count else None,
            self.epochs[index] if len(self.epochs) == count else None,
            self.lines[index] if len(self.lines) == count else None,
        )

    @property
    def role(self) -> Role:
        """What the numbers are."""
        return self.metric.role

    @property
    def name(self) -> str:
        """The name, with what it was measured on."""
        return f"{self.label} {self.metric.name}" if self.label else self.metric.name

    def bad(self) -> list[int]:
        """Returns where the numbers are not finite, the first so many places."""
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

    def _add_values(self, values: Sequence[float]) -> None:
        if self.values.typecode == "f":
            is_narrow = isinstance(values, array) and values.typecode == "f"
            narrow = values if is_narrow else array("f", values)
            # What is too large for single precision becomes infinite, and so does the sum.
            if (
                is_narrow
                or math.isfinite(sum(narrow))
                or not any(math.isfinite(value) and abs(value) > _LARGEST for value in values)
            ):
                self.values.extend(narrow)
                return
            self.values = array("d", self.values)
        self.values.extend(array("d", values))


def _not_finite(values: array[float]) -> list[int]:
    # One sum tells for most logs that there is nothing to look for.
    if math.isfinite(sum(values)):
        return []
    if len(values) > _LONG:
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

    role: Role
    said: str
    step: int | None
    line: int | None


@dataclass(slots=True)
class Log:
    """What one log says.

    Attributes:
        path: The file or folder.
        series: The metrics, in the order in which they first appear.
        notes: What it says in words.
        problem: Why the log could not be read to its end, if so.
        sparse: Whether NaN may stand for "not measured" in this format.
    """

    path: str
    series: list[MetricSeries] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    problem: SourceError | None = None
    sparse: bool = False

    def of(self, role: Role) -> list[MetricSeries]:
        """Returns the series of one role."""
        return [series for series in self.series if series.role is role]
