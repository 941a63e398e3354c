"""Records read one by one: slower than whole tables, and able to say what is wrong with each."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nanguard.check.data.columns import (
    Column,
    ColumnNumbers,
    LabelColumn,
    RowPlace,
    Shape,
    Tokens,
    label_of,
)
from nanguard.check.data.dataset import Ledger
from nanguard.check.data.tables import MIN_ZERO_WIDTH

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from nanguard.check.data.columns import ColumnRoles
    from nanguard.check.data.dataset import WatchedValues

MAX_COLUMNS = 4096
_WIDER: dict[Shape, Shape] = {"int": "float", "ints": "floats"}
_LISTED: dict[Shape, Shape] = {"int": "ints", "float": "floats", "bool": "ints", "text": "texts"}


def columns_of(records: Iterable[Mapping[str, Any]]) -> list[Column]:
    """Returns the columns that records have, in the order in which they are first seen."""
    votes: dict[str, dict[tuple[Shape, int], int]] = {}
    for record in records:
        for name, value in record.items():
            if name not in votes and len(votes) >= MAX_COLUMNS:
                continue
            shape = shape_of(value)
            counts = votes.setdefault(name, {})
            counts[shape] = counts.get(shape, 0) + 1
    return [Column(name, *_winner(counts)) for name, counts in votes.items()]


def speakable(record: Any) -> Any:
    """Returns a record whose names and texts can be written down: half a character cannot be."""
    if not isinstance(record, dict):
        return record
    return {
        _written(name): _written(value) if isinstance(value, str) else value
        for name, value in record.items()
    }


def _written(text: str) -> str:
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def shape_of(value: Any, depth: int = 0) -> tuple[Shape, int]:
    """Returns what a value is, and in how many lists it lies."""
    if value is None:
        return "empty", depth
    if isinstance(value, bool):
        return "bool", depth
    if isinstance(value, int):
        return "int", depth
    if isinstance(value, float):
        return "float", depth
    if isinstance(value, str):
        return "text", depth
    if isinstance(value, list) and depth < 3:
        return _shape_of_list(value, depth)
    return "other", depth


def _shape_of_list(values: list[Any], depth: int) -> tuple[Shape, int]:
    inner = {shape_of(value, depth + 1) for value in values[:64]}
    inner = {one for one in inner if one[0] != "empty"}
    if not inner:
        return "empty", depth + 1
    depths = {one[1] for one in inner}
    shapes = {one[0] for one in inner}
    if len(depths) > 1:
        return "other", depth
    deep = depths.pop()
    if shapes <= {"int", "bool", "ints"}:
        return "ints", deep
    if shapes <= {"int", "float", "ints", "floats"}:
        return "floats", deep
    if len(shapes) == 1:
        return _LISTED.get(next(iter(shapes)), "other"), deep
    return "other", deep


def _winner(counts: dict[tuple[Shape, int], int]) -> tuple[Shape, int]:
    """Returns what most values of a column are; some fractions make all of them fractions."""
    kept = {one: count for one, count in counts.items() if one[0] != "empty"}
    if not kept:
        return "empty", 0
    shape, depth = max(kept, key=lambda one: kept[one])
    total = sum(kept.values())
    wide = _WIDER.get(shape)
    if wide is not None and kept.get((wide, depth), 0) * 20 > total:
        return wide, depth
    return shape, depth


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

    roles: ColumnRoles
    watch: WatchedValues
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
            self._label(record, RowPlace(at, line))
        for column in self.roles.tokens:
            self._tokens(record.get(column.name), column, RowPlace(at, line), targets=False)
        if self.roles.targets is not None:
            column = self.roles.targets
            self._tokens(record.get(column.name), column, RowPlace(at, line), targets=True)
        numbers = [self._feature(record, column, at) for column in self.roles.features]
        if len(numbers) >= MIN_ZERO_WIDTH and all(number == 0 for number in numbers):
            self.ledger.zero.add(RowPlace(at, line))

    def finish(self) -> Ledger:
        """Returns what was counted."""
        import numpy as np

        for column in self.roles.features:
            held = self._held.get(column.name, [])
            numbers = ColumnNumbers(
                column.name, whole=column.shape in ("int", "ints"), alone=column.depth == 0
            )
            values = np.array([value for value, _ in held], dtype="float64")
            rows = [row for _, row in held]
            numbers.add(
                values,
                lambda at, value, rows=rows: RowPlace(  # type: ignore[misc]
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

    def _label(self, record: Mapping[str, Any], place: RowPlace) -> None:
        column = self.roles.label
        assert column is not None  # noqa: S101 - the caller has looked
        if self.ledger.labels is None:
            self.ledger.labels = LabelColumn(column.name, many=column.depth > 0)
        value = record.get(column.name)
        group = record.get(self.roles.group) if self.roles.group else None
        group = group if isinstance(group, str) else None
        for one in _flat(value) if isinstance(value, list) else (value,):
            self._one_label(self.ledger.labels, one, group, place)

    def _one_label(
        self, labels: LabelColumn, value: Any, group: str | None, place: RowPlace
    ) -> None:
        shown = RowPlace(place.record, place.line, repr(value)[:80])
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

    def _tokens(self, value: Any, column: Column, place: RowPlace, *, targets: bool) -> None:
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
                tokens.outside.add(RowPlace(place.record, place.line, str(one)))

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
