"""Records read one by one: slower than whole tables, and able to say what is wrong with each."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nanguard.check.data.labels import Labels, label_of
from nanguard.check.data.ledger import Ledger
from nanguard.check.data.matrix import MIN_ZERO_WIDTH
from nanguard.check.data.numbers import Numbers
from nanguard.check.data.places import Place
from nanguard.check.data.tokens import Tokens

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from nanguard.check.data.roles import Column, Roles
    from nanguard.check.data.watching import Watch

MISSING = frozenset(("", "na", "n/a", "null", "none", "nil", "nan", "<na>", "?", "-"))
MAX_HELD = 4_000_000  # numbers of one column that are held until they are counted


@dataclass
class RowReader:
    """Counts what is in records, one at a time.

    Attributes:
        roles: What the columns are for.
        watch: What to look out for.
        ledger: What was counted so far.
    """

    roles: Roles
    watch: Watch
    ledger: Ledger = field(default_factory=Ledger)
    _held: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    _lines: list[int | None] = field(default_factory=list)

    def add(self, record: Mapping[str, Any], line: int | None) -> None:
        """Counts one record; one whose numbers are no numbers counts as unreadable."""
        at = self.ledger.records
        wrong = self._wrong(record)
        if wrong is not None:
            self.ledger.refuse(line, wrong)
        self.ledger.records += 1
        self._lines.append(line)
        if self.roles.label is not None:
            self._label(record, Place(at, line))
        for column in self.roles.tokens:
            self._tokens(record.get(column.name), column, Place(at, line), targets=False)
        if self.roles.targets is not None:
            column = self.roles.targets
            self._tokens(record.get(column.name), column, Place(at, line), targets=True)
        numbers = [self._feature(record, column, at) for column in self.roles.features]
        if len(numbers) >= MIN_ZERO_WIDTH and all(number == 0 for number in numbers):
            self.ledger.zero.add(Place(at, line))

    def finish(self) -> Ledger:
        """Returns what was counted."""
        import numpy as np

        for column in self.roles.features:
            held = self._held.get(column.name, [])
            numbers = Numbers(
                column.name, whole=column.shape in ("int", "ints"), alone=column.depth == 0
            )
            values = np.array([value for value, _ in held], dtype="float64")
            rows = [row for _, row in held]
            numbers.add(
                values,
                lambda at, value, rows=rows: Place(  # type: ignore[misc]
                    rows[at], self._lines[rows[at]], value
                ),
            )
            self.ledger.columns[column.name] = numbers
        return self.ledger

    def _wrong(self, record: Mapping[str, Any]) -> str | None:
        for column in self.roles.features:
            value = record.get(column.name)
            if isinstance(value, str) and number_in(value) is None and not is_missing(value):
                return f"{column.name} is {value[:40]!r}, not a number"
        return None

    def _label(self, record: Mapping[str, Any], place: Place) -> None:
        column = self.roles.label
        assert column is not None  # noqa: S101 - the caller has looked
        if self.ledger.labels is None:
            self.ledger.labels = Labels(column.name, many=column.depth > 0)
        value = record.get(column.name)
        group = record.get(self.roles.group) if self.roles.group else None
        group = group if isinstance(group, str) else None
        for one in _flat(value) if isinstance(value, list) else (value,):
            self._one_label(self.ledger.labels, one, group, place)

    def _one_label(self, labels: Labels, value: Any, group: str | None, place: Place) -> None:
        shown = Place(place.record, place.line, repr(value)[:80])
        if (
            value is None
            or (isinstance(value, str) and is_missing(value))
            or (isinstance(value, float) and value != value)
        ):
            labels.missing.add(shown)
        elif isinstance(value, float) and math.isinf(value):
            labels.infinite.add(shown)
        elif isinstance(value, (bool, int, float, str)):
            labels.add(label_of(group, value), 1, [shown])
        else:
            labels.odd.add(shown)

    def _tokens(self, value: Any, column: Column, place: Place, *, targets: bool) -> None:
        tokens = self.ledger.tokens.setdefault(column.name, Tokens(column.name, targets=targets))
        ids = [one for one in _flat(value) if isinstance(one, int)]
        if not ids:
            return
        tokens.widen(min(ids), max(ids), len(ids))
        size = self.watch.expected.vocabulary
        for one in ids:
            if one < 0 or (size is not None and one >= size):
                if targets and one in self.watch.ignored:
                    continue
                tokens.outside.add(Place(place.record, place.line, str(one)))

    def _feature(self, record: Mapping[str, Any], column: Column, row: int) -> float | None:
        """Holds the numbers of a feature; returns the last of them."""
        held = self._held.setdefault(column.name, [])
        last = None
        for one in _flat(record.get(column.name)):
            number = number_in(one) if isinstance(one, str) else one
            if isinstance(number, (int, float)) and not isinstance(number, bool):
                last = _as_float(number)
                if len(held) < MAX_HELD or not math.isfinite(last):
                    held.append((last, row))
        return last


def is_missing(text: str) -> bool:
    """Returns whether a text stands for no value."""
    return text.strip().lower() in MISSING


def number_in(text: str) -> float | None:
    """Returns the number that a text is; None if it is none."""
    try:
        return float(text) if "_" not in text else None
    except ValueError:
        return None


def _as_float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf


def _flat(value: Any, depth: int = 0) -> Iterator[Any]:
    if isinstance(value, list):
        if depth < 8:
            for one in value:
                yield from _flat(one, depth + 1)
    elif value is not None:
        yield value
