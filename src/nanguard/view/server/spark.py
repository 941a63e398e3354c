"""A curve in a hundred buckets that grows with its run and forgets no extreme."""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST = 128


class Spark:
    """Smallest and largest values of neighbouring points, and where they are not finite.

    When there are too many buckets, neighbours become one. A bucket without a finite point has
    the limits (inf, -inf).

    Attributes:
        points: How many points there were.
        bad: How many of them are not finite.
        last: The last value.
        lows: The smallest finite value of each bucket.
        highs: The largest finite value of each bucket.
        holes: Whether something in each bucket is not finite.
    """

    __slots__ = ("_size", "_there", "bad", "highs", "holes", "last", "lows", "points")

    def __init__(self) -> None:
        self.points = self.bad = 0
        self.last = math.nan
        self.lows, self.highs, self.holes = array("d"), array("d"), bytearray()
        self._size = 1
        self._there = 0

    def extend(self, values: array[float]) -> None:
        """Adds values."""
        at = 0
        while at < len(values):
            if self._there == 0 or self._there == self._size:
                self._open()
            # Whole buckets at a time: a run of a million steps is added in a few thousand pieces.
            part = values[at : at + self._size - self._there]
            self._add(part)
            at += len(part)
            self._there += len(part)
        if len(values):
            self.points += len(values)
            self.last = values[-1]

    def _open(self) -> None:
        if len(self.lows) >= MOST:
            self.lows = array("d", map(min, self.lows[::2], self.lows[1::2]))
            self.highs = array("d", map(max, self.highs[::2], self.highs[1::2]))
            self.holes = bytearray(map(max, self.holes[::2], self.holes[1::2]))
            self._size *= 2
        self.lows.append(math.inf)
        self.highs.append(-math.inf)
        self.holes.append(0)
        self._there = 0

    def _add(self, part: Sequence[float]) -> None:
        if not math.isfinite(sum(part)):
            finite = [value for value in part if math.isfinite(value)]
            if len(finite) < len(part):
                self.bad += len(part) - len(finite)
                self.holes[-1] = 1
            part = finite
        if len(part):
            self.lows[-1] = min(self.lows[-1], min(part))
            self.highs[-1] = max(self.highs[-1], max(part))
