"""A curve of any length in bounded memory: every extreme and every bad number stays visible."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_MOST = 1024


@dataclass(slots=True)
class Bucket:
    """Neighbouring numbers.

    Attributes:
        low: The lowest finite one; infinite if there is none.
        high: The highest finite one; minus infinity if there is none.
        bad: How many are not finite.
        count: How many there are.
        begins: Whether a new run begins here, so that nothing is joined to what was before.
    """

    low: float = math.inf
    high: float = -math.inf
    bad: int = 0
    count: int = 0
    begins: bool = False

    @property
    def empty(self) -> bool:
        """Whether no number is finite."""
        return self.high < self.low

    def add(self, values: Sequence[float]) -> None:
        """Takes in numbers."""
        self.count += len(values)
        if not math.isfinite(sum(values)):
            finite = [value for value in values if math.isfinite(value)]
            self.bad += len(values) - len(finite)
            values = finite
        if values:
            self.low, self.high = min(self.low, min(values)), max(self.high, max(values))

    def merge(self, other: Bucket) -> None:
        """Takes in a neighbour."""
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.bad += other.bad
        self.count += other.count
        self.begins |= other.begins


class Trace:
    """The numbers of one series, as far as a picture of them needs them.

    Attributes:
        buckets: The numbers in order, the same count in all but the last.
        first: The first step; None if there is none.
        last: The last step.
    """

    def __init__(self) -> None:
        self.buckets: list[Bucket] = []
        self.first: int | None = None
        self.last: int | None = None
        self._stride = 1

    def extend(
        self, values: Sequence[float], steps: Sequence[int] | None, *, begins: bool = False
    ) -> None:
        """Adds numbers, and says whether a new run begins with them."""
        if steps:
            self.first = steps[0] if self.first is None else self.first
            self.last = steps[-1]
        at = 0
        while at < len(values):
            if not self.buckets or self.buckets[-1].count >= self._stride:
                if len(self.buckets) >= _MOST:
                    self._merge()
                    continue
                self.buckets.append(Bucket())
            bucket = self.buckets[-1]
            if at == 0 and begins:
                bucket.begins = True
            room = self._stride - bucket.count
            bucket.add(values[at : at + room])
            at += room

    def _merge(self) -> None:
        kept = self.buckets[::2]
        for bucket, other in zip(kept, self.buckets[1::2], strict=False):
            bucket.merge(other)
        self.buckets = kept
        self._stride *= 2

    def columns(self, count: int) -> list[Bucket]:
        """Returns the curve in at most so many buckets, of equal width."""
        if len(self.buckets) <= count:
            return self.buckets
        out = [Bucket() for _ in range(count)]
        for place, bucket in enumerate(self.buckets):
            out[place * count // len(self.buckets)].merge(bucket)
        return out
