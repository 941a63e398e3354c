"""What is known about a data file, or about a part of it, once it was read."""

from __future__ import annotations

from dataclasses import dataclass, field

from nanguard.check.data.labels import Labels
from nanguard.check.data.numbers import Numbers
from nanguard.check.data.places import Place, Places
from nanguard.check.data.tokens import Tokens


@dataclass(slots=True)
class Ledger:
    """What a part of a file holds.

    Attributes:
        records: How many records there are, unreadable ones left out.
        lines: How many lines there are.
        labels: Its labels; None if it has none.
        columns: Its columns of numbers, by name.
        tokens: Its columns of token ids, by name.
        unreadable: Records that cannot be read; the value of a place says why.
        conflict: Whether marks of an unfinished merge were seen.
        damaged: Whether readers of its format refuse the file as a whole because of them.
        zero: Records whose features are all zero.
    """

    records: int = 0
    lines: int = 0
    labels: Labels | None = None
    columns: dict[str, Numbers] = field(default_factory=dict)
    tokens: dict[str, Tokens] = field(default_factory=dict)
    unreadable: Places = field(default_factory=Places)
    conflict: bool = False
    damaged: bool = False
    zero: Places = field(default_factory=Places)

    def merge(self, other: Ledger) -> None:
        """Takes over what was read of the part of the file that follows."""
        records, lines = self.records, self.lines
        if other.labels is not None:
            if self.labels is None:
                self.labels = Labels(other.labels.key)
            self.labels.merge(other.labels, records, lines)
        for name, numbers in other.columns.items():
            mine = self.columns.setdefault(
                name, Numbers(name, whole=numbers.whole, alone=numbers.alone)
            )
            mine.merge(numbers, records, lines)
        for name, tokens in other.tokens.items():
            self.tokens.setdefault(name, Tokens(name, targets=tokens.targets)).merge(
                tokens, records, lines
            )
        self.unreadable.merge(other.unreadable, records, lines)
        self.zero.merge(other.zero, records, lines)
        self.conflict |= other.conflict
        self.damaged |= other.damaged
        self.records += other.records
        self.lines += other.lines

    @classmethod
    def overlong(cls) -> Ledger:
        """Returns the ledger of a line that is longer than any record."""
        ledger = cls()
        ledger.refuse(1, "the line is longer than any record")
        ledger.lines = 1
        return ledger

    def refuse(self, line: int | None, why: str) -> None:
        """Notes a record that cannot be read."""
        self.unreadable.add(Place(self.records, line, why))
