"""The numbers of a column: their range, their usual size, and those that are not finite."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nanguard.check.data.places import MAX_PLACES, Place, Places

if TYPE_CHECKING:
    from collections.abc import Callable

SAMPLED = 4096  # rows of a block that say how large numbers usually are


@dataclass(slots=True)
class Numbers:
    """What the numbers of one column are.

    Attributes:
        name: The column.
        count: How many there are.
        bad: Those that are not finite.
        low: The smallest that is finite.
        high: The largest that is finite.
        largest: Where the one with the largest magnitude stands.
        zeros: How many of the sampled ones are zero.
        sampled: How many were looked at for their size.
        logs: The sum of the binary logarithms of those of them that are not zero.
        squares: The sum of the squares of these logarithms.
        whole: Whether the column holds whole numbers by its type.
        alone: Whether each record has one number here, not a list of them.
    """

    name: str
    count: int = 0
    bad: Places = field(default_factory=Places)
    low: float = math.inf
    high: float = -math.inf
    largest: Place | None = None
    zeros: int = 0
    sampled: int = 0
    logs: float = 0.0
    squares: float = 0.0
    whole: bool = False
    alone: bool = True

    @property
    def magnitude(self) -> float:
        """The largest magnitude of a finite number; 0 if there is none."""
        return max(abs(self.low), abs(self.high)) if self.low <= self.high else 0.0

    @property
    def usual(self) -> float:
        """The geometric mean of the magnitudes that are not zero; 0 if all are."""
        others = self.sampled - self.zeros
        return 2.0 ** (self.logs / others) if others else 0.0

    @property
    def apart(self) -> float:
        """How many deviations the largest magnitude is from the others, as logarithms."""
        others = self.sampled - self.zeros
        if others < 3 or not self.magnitude:
            return 0.0
        top = math.log2(self.magnitude)
        logs, squares = self.logs, self.squares
        if self.sampled >= self.count:  # then the largest is among them, and is left out
            logs, squares, others = logs - top, squares - top * top, others - 1
        mean = logs / others
        return (top - mean) / math.sqrt(max(squares / others - mean * mean, 0.25))

    @property
    def constant(self) -> bool:
        """Whether all numbers are the same."""
        return self.count > 1 and not self.bad.count and self.low == self.high

    def add(self, values: Any, place: Callable[[int, str], Place]) -> None:
        """Notes a block of numbers.

        Args:
            values: The numbers, a NumPy array of one dimension.
            place: Returns the place of a number by its position in the block, with its value.
        """
        import numpy as np

        if not values.size:
            return
        self.count += int(values.size)
        low, high = float(values.min()), float(values.max())
        if not (math.isfinite(low) and math.isfinite(high)):
            values = self._sorted_out(values, place)
            if not values.size:
                return
            low, high = float(np.nanmin(values)), float(np.nanmax(values))
        if max(abs(low), abs(high)) > self.magnitude or self.largest is None:
            at = int(np.nanargmax(values) if abs(high) >= abs(low) else np.nanargmin(values))
            self.largest = place(at, f"{float(values[at]):.4g}")
        self.low, self.high = min(self.low, low), max(self.high, high)
        self._sample(values[:: max(1, values.size // SAMPLED)])

    def _sorted_out(self, values: Any, place: Callable[[int, str], Place]) -> Any:
        """Notes the numbers that are not finite, and returns the block with NaN for each."""
        import numpy as np

        wrong = np.flatnonzero(~np.isfinite(values))
        self.bad.count += int(wrong.size)
        for at in wrong[: max(0, MAX_PLACES - len(self.bad.first))]:
            self.bad.first.append(place(int(at), str(float(values[at]))))
        if wrong.size == values.size:
            return values[:0]
        kept = values.astype("float64")
        kept[wrong] = np.nan
        return kept

    def _sample(self, values: Any) -> None:
        import numpy as np

        sizes = np.abs(values.astype("float64"))
        sizes = sizes[np.isfinite(sizes)]
        other = sizes[sizes > 0]
        self.sampled += int(sizes.size)
        self.zeros += int(sizes.size - other.size)
        logs = np.log2(other)
        self.logs += float(logs.sum())
        self.squares += float((logs * logs).sum())

    def merge(self, other: Numbers, records: int, lines: int) -> None:
        """Takes over what was seen in the part of the file that follows."""
        if other.largest is not None and (self.largest is None or other.magnitude > self.magnitude):
            self.largest = other.largest.shifted(records, lines)
        self.count += other.count
        self.bad.merge(other.bad, records, lines)
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.zeros += other.zeros
        self.sampled += other.sampled
        self.logs += other.logs
        self.squares += other.squares
        self.whole &= other.whole
        self.alone &= other.alone
