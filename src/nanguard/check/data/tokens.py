"""The token ids of a data file: their range, and those that no vocabulary can hold."""

from __future__ import annotations

from dataclasses import dataclass, field

from nanguard.check.data.places import Places


@dataclass(slots=True)
class Tokens:
    """What the token ids of one column are.

    Attributes:
        name: The column.
        count: How many there are.
        low: The smallest; None if there is none.
        high: The largest; None if there is none.
        outside: Those below zero, or beyond the vocabulary where its size is known.
        targets: Whether they are what a model has to predict, where some may be ignored.
    """

    name: str
    count: int = 0
    low: int | None = None
    high: int | None = None
    outside: Places = field(default_factory=Places)
    targets: bool = False

    def widen(self, low: int, high: int, count: int) -> None:
        """Notes the range of a number of ids."""
        self.low = low if self.low is None else min(self.low, low)
        self.high = high if self.high is None else max(self.high, high)
        self.count += count

    def merge(self, other: Tokens, records: int, lines: int) -> None:
        """Takes over what was seen in the part of the file that follows."""
        if other.low is not None and other.high is not None:
            self.widen(other.low, other.high, other.count)
        self.outside.merge(other.outside, records, lines)
