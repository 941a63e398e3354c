"""A data set as rules read it: its files, what they hold, and what is expected of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from nanguard.check.data.columns import (
    ColumnNumbers,
    ColumnRoles,
    LabelColumn,
    RowPlace,
    RowPlaces,
    Tokens,
)
from nanguard.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nanguard.check.data.columns import Label
    from nanguard.check.scan import Expected


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
    labels: LabelColumn | None = None
    columns: dict[str, ColumnNumbers] = field(default_factory=dict)
    tokens: dict[str, Tokens] = field(default_factory=dict)
    unreadable: RowPlaces = field(default_factory=RowPlaces)
    conflict: bool = False
    damaged: bool = False
    zero: RowPlaces = field(default_factory=RowPlaces)

    def merge(self, other: Ledger) -> None:
        """Takes over what was read of the part of the file that follows."""
        records, lines = self.records, self.lines
        if other.labels is not None:
            if self.labels is None:
                self.labels = LabelColumn(other.labels.key)
            self.labels.merge(other.labels, records, lines)
        for name, numbers in other.columns.items():
            mine = self.columns.setdefault(
                name, ColumnNumbers(name, whole=numbers.whole, alone=numbers.alone)
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
        self.unreadable.add(RowPlace(self.records, line, why))


class NeedsCodeError(SourceError):
    """A file that only code of its own can read, which is never run."""


@dataclass(frozen=True, slots=True)
class Missing:
    """A file that a configuration names and that is not there.

    Attributes:
        config: The configuration.
        line: The line that names it, counted from 1.
        key: The setting, dotted.
        written: The file as it is written there.
        empty: Whether there is a folder of that name, without any data in it.
    """

    config: str
    line: int
    key: str
    written: str
    empty: bool = False


@dataclass(frozen=True)
class Request:
    """Files that belong together, and what is expected of them.

    Attributes:
        paths: The files.
        expected: What they are checked against.
        measured: Whether labels are measurements, not classes.
        config: The configuration that names them; None if none does.
        missing: Files that it names and that are not there.
        named: How many classes a list of names has; None if there is none.
        names: The file or setting that names them.
    """

    paths: tuple[Path, ...]
    expected: Expected
    measured: bool = False
    config: str | None = None
    missing: tuple[Missing, ...] = ()
    named: int | None = None
    names: str | None = None


@dataclass
class DataFile:
    """One file of a data set, read.

    Attributes:
        path: The file, as the user named it.
        format: What it is, such as ``JSON lines``.
        ledger: What it holds.
        roles: What its columns are for.
        broken: Why it cannot be read as what it is; None if it can.
        error: Why it was not looked at; None if it was.
    """

    path: str
    format: str
    ledger: Ledger = field(default_factory=Ledger)
    roles: ColumnRoles = field(default_factory=ColumnRoles)
    broken: str | None = None
    error: SourceError | None = None

    @property
    def has_lines(self) -> bool:
        """Whether records can be found by their lines."""
        return self.format in ("JSON lines", "CSV")


@dataclass
class DataSet:
    """Files that belong together, read.

    Attributes:
        files: The files.
        request: What was to be read.
    """

    files: tuple[DataFile, ...]
    request: Request

    @property
    def path(self) -> str:
        """The first file, or the configuration where there is none."""
        return self.files[0].path if self.files else str(self.request.config)

    @property
    def watch(self) -> WatchedValues:
        """What is expected, as questions."""
        return WatchedValues(self.request.expected, self.request.measured)

    @property
    def read_from(self) -> list[str]:
        """The paths of its files."""
        return [file.path for file in self.files]

    @property
    def not_read(self) -> list[tuple[str, str]]:
        """Files that could not be looked at, each with the reason."""
        return [(file.path, file.error.what) for file in self.files if file.error is not None]

    def labelled(self) -> Iterator[tuple[DataFile, LabelColumn]]:
        """Yields the files that have labels."""
        for file in self.files:
            if file.ledger.labels is not None:
                yield file, file.ledger.labels


@dataclass
class WatchedValues:
    """What a scan looks out for.

    Attributes:
        expected: What data is checked against.
        measured: Whether labels are measurements, not classes.
    """

    expected: Expected
    measured: bool = False

    @cached_property
    def ignored(self) -> frozenset[int]:
        """Labels that are meant to be skipped."""
        return frozenset(self.expected.ignored)

    def classes(self, group: str | None) -> int | None:
        """Returns how many classes labels of a data set have; None if that is not known."""
        if group is not None and group in self.expected.groups:
            return self.expected.groups[group]
        return self.expected.classes

    def suspects(self, label: Label) -> bool:
        """Returns whether the places of a label are worth noting beyond the first."""
        if self.measured or label.kind in ("text", "bool"):
            return False
        value = float(label.value)
        if label.value in self.ignored:
            return False
        known = self.classes(label.group)
        return value < 0 or not value.is_integer() or (known is not None and value >= known)
