"""The labels of a data file, counted: which values there are, how often, and where first."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from nanguard.check.data.places import MAX_PLACES, Place, Places

Kind = Literal["int", "float", "text", "bool"]
Value = int | float | str | bool
MAX_DISTINCT = 50_000


class Label(NamedTuple):
    """One value that labels have.

    Attributes:
        group: The data set that its records name; None if they name none.
        kind: How it is written.
        value: The value.
    """

    group: str | None
    kind: Kind
    value: Value


def label_of(group: str | None, value: Value) -> Label:
    """Returns the label that a value is."""
    if isinstance(value, bool):
        return Label(group, "bool", value)
    if isinstance(value, int):
        return Label(group, "int", value)
    if isinstance(value, float):
        return Label(group, "float", value)
    return Label(group, "text", value[:200])


@dataclass(slots=True)
class Labels:
    """What the labels of a file, or of a part of it, are.

    Attributes:
        key: The column, key or array they stand in.
        many: Whether a record has several of them.
        seen: Every value with its places.
        missing: Records without a label.
        infinite: Labels that are infinite.
        odd: Labels that are neither a number nor a text, such as a mapping.
        total: How many labels there are, those that are missing left out.
        overflowed: Whether there are too many values to keep apart, as measurements have.
        fractional: How many labels are no whole numbers.
    """

    key: str
    many: bool = False
    seen: dict[Label, Places] = field(default_factory=dict)
    missing: Places = field(default_factory=Places)
    infinite: Places = field(default_factory=Places)
    odd: Places = field(default_factory=Places)
    total: int = 0
    overflowed: bool = False
    fractional: int = 0

    def add(self, label: Label, count: int, places: list[Place]) -> None:
        """Notes a value that was seen a number of times."""
        self.total += count
        if label.kind == "float" and not float(label.value).is_integer():
            self.fractional += count
        known = self.seen.get(label)
        if known is None:
            if len(self.seen) >= MAX_DISTINCT:
                self.overflowed = True
                return
            known = self.seen[label] = Places()
        known.count += count
        known.first += places[: max(0, MAX_PLACES - len(known.first))]

    def merge(self, other: Labels, records: int, lines: int) -> None:
        """Takes over what was seen in the part of the file that follows."""
        self.many |= other.many
        self.overflowed |= other.overflowed
        self.total += other.total
        self.fractional += other.fractional
        for mine, its in (
            (self.missing, other.missing),
            (self.infinite, other.infinite),
            (self.odd, other.odd),
        ):
            mine.merge(its, records, lines)
        for label, places in other.seen.items():
            known = self.seen.get(label)
            if known is None:
                if len(self.seen) >= MAX_DISTINCT:
                    self.overflowed = True
                    continue
                known = self.seen[label] = Places()
            known.merge(places, records, lines)

    def numbers(self, group: str | None = None, *, every: bool = False) -> dict[int, int]:
        """Returns how often each whole number was seen, of one data set or of all."""
        out: dict[int, int] = {}
        for label, places in self.seen.items():
            if (every or label.group == group) and (whole := whole_number(label)) is not None:
                out[whole] = out.get(whole, 0) + places.count
        return out


def whole_number(label: Label) -> int | None:
    """Returns a label as a whole number, also where it is written as ``3.0`` or as text."""
    if label.kind in ("int", "bool"):
        return int(label.value)
    if label.kind == "float" and float(label.value).is_integer():
        return int(label.value)
    return None
