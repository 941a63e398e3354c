"""The first places at which something was seen in a data file, and how often it was."""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_PLACES = 5


@dataclass(frozen=True, slots=True)
class Place:
    """One record of a file.

    Attributes:
        record: The record, counted from 0.
        line: Its line, counted from 1; None where the file has no lines.
        value: What stands there, in short.
    """

    record: int
    line: int | None
    value: str = ""

    def shifted(self, records: int, lines: int) -> Place:
        """Returns the place in a file that has records and lines before this part of it."""
        line = None if self.line is None else self.line + lines
        return Place(self.record + records, line, self.value)


@dataclass(slots=True)
class Places:
    """How often something was seen, and where first.

    Attributes:
        count: How often.
        first: The first few places, in order.
        unit: What a record is called where it has no line.
    """

    count: int = 0
    first: list[Place] = field(default_factory=list)
    unit: str = "record"

    def add(self, place: Place, count: int = 1) -> None:
        """Notes a place that stands for a number of them."""
        self.count += count
        if len(self.first) < MAX_PLACES:
            self.first.append(place)

    def merge(self, other: Places, records: int, lines: int) -> None:
        """Takes over what was seen in the part of the file that follows."""
        self.count += other.count
        room = MAX_PLACES - len(self.first)
        if room > 0:
            self.first += [place.shifted(records, lines) for place in other.first[:room]]

    @property
    def line(self) -> int | None:
        """The first line; None where there is none."""
        return self.first[0].line if self.first else None

    def told(self) -> str:
        """Returns where, in words: ``at lines 3, 9 and 2 more``."""
        lines = [place.line for place in self.first]
        if any(line is None for line in lines):
            shown = list(dict.fromkeys(place.record for place in self.first))
            word = self.unit
        else:
            shown = list(dict.fromkeys(line for line in lines if line is not None))
            word = "line"
        named = ", ".join(str(at) for at in shown)
        more = self.count - len(self.first)
        plural = "s" if len(shown) > 1 or more else ""
        return f"{word}{plural} {named}" + (f" and {more} more" if more > 0 else "")


def merged(groups: list[Places]) -> Places:
    """Returns what several groups saw in one file, in the order of its records."""
    first = sorted((place for group in groups for place in group.first), key=lambda p: p.record)
    unit = next((group.unit for group in groups), "record")
    return Places(sum(group.count for group in groups), first[:MAX_PLACES], unit)
