"""Tables that polars has read, counted column by column."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanguard.check.data.labels import Label, Labels, label_of
from nanguard.check.data.ledger import Ledger
from nanguard.check.data.matrix import MAX_WIDTH, MIN_ZERO_WIDTH, Matrix
from nanguard.check.data.numbers import Numbers
from nanguard.check.data.places import MAX_PLACES, Place
from nanguard.check.data.tokens import Tokens

if TYPE_CHECKING:
    import polars as pl

    from nanguard.check.data.roles import Column, Roles
    from nanguard.check.data.watching import Watch

Lines = Callable[[int], int | None]
MANY = 1000  # different fractions in one block: measurements, not classes
_ROW = "__row"


def no_lines(row: int) -> None:
    """Returns that a file has no lines."""


def one_per_record(row: int) -> int:
    """Returns the line of a record where each has its own, from the first on."""
    return row + 1


@dataclass(frozen=True)
class FrameReader:
    """Counts what is in tables.

    Attributes:
        roles: What the columns are for.
        watch: What to look out for.
        lines: Returns the line of a row.
    """

    roles: Roles
    watch: Watch
    lines: Lines = no_lines

    def read(self, frame: pl.DataFrame) -> Ledger:
        """Returns what a table holds."""
        ledger = Ledger(records=frame.height)
        frame = frame.select(self.roles.read).with_row_index(_ROW)
        label = self.roles.label
        if label is not None and label.name in frame.columns:
            ledger.labels = self._labels(frame, label)
        for column in self.roles.tokens:
            ledger.tokens[column.name] = self._tokens(frame, column, targets=False)
        if self.roles.targets is not None:
            column = self.roles.targets
            ledger.tokens[column.name] = self._tokens(frame, column, targets=True)
        for column in self.roles.features:
            self._feature(frame, column, ledger)
        self._zero_rows(frame, ledger)
        return ledger

    def _place(self, row: int, value: object = "") -> Place:
        return Place(row, self.lines(row), _short(value))

    def _labels(self, frame: pl.DataFrame, column: Column) -> Labels:
        import polars as pl

        name, group = column.name, self.roles.group
        labels = Labels(name, many=column.depth > 0)
        labels.missing.count = frame[name].null_count()
        if labels.missing.count:
            for row in frame.filter(pl.col(name).is_null())[_ROW].head(MAX_PLACES):
                labels.missing.first.append(self._place(row))
        frame = frame.select(_ROW, name, *([group] if group else []))
        while isinstance(frame.schema[name], (pl.List, pl.Array)):
            frame = frame.explode(name)
        if frame[name].null_count():
            frame = frame.filter(pl.col(name).is_not_null())
        if frame.schema[name].is_float():
            frame = self._finite(frame, labels)
            if self._measured(frame[name], labels):
                return labels
        elif not (frame.schema[name].is_integer() or frame.schema[name] in _words()):
            return labels
        keys = [name, group] if group else [name]
        counted = frame.lazy().group_by(keys).agg(pl.len().alias("__n"), pl.col(_ROW).min())
        table = counted.collect(engine="streaming")
        for value, *named, count, first in table.sort(_ROW).iter_rows():
            label = label_of(named[0] if named else None, value)
            labels.add(label, count, self._label_places(frame, label, name, first))
        return labels

    def _finite(self, frame: pl.DataFrame, labels: Labels) -> pl.DataFrame:
        """Takes NaN, which stands for a missing label, and infinite labels out of a table."""
        import polars as pl

        name = labels.key
        if frame[name].is_finite().all():
            return frame
        for places, wrong in (
            (labels.missing, pl.col(name).is_nan()),
            (labels.infinite, pl.col(name).is_infinite()),
        ):
            bad = frame.filter(wrong)
            for row, value in bad.select(_ROW, name).head(MAX_PLACES).iter_rows():
                places.add(self._place(row, value), 0)
            places.count += bad.height
        return frame.filter(pl.col(name).is_finite())

    def _measured(self, values: pl.Series, labels: Labels) -> bool:
        """Notes labels that are measurements; returns whether they are."""
        sample = values.head(4 * MANY)
        if sample.n_unique() <= MANY or self.watch.classes(None) or self.watch.expected.groups:
            return False
        labels.overflowed = True
        labels.total += len(values)
        labels.fractional += int((values != values.round()).sum())
        return True

    def _label_places(
        self, frame: pl.DataFrame, label: Label, name: str, first: int
    ) -> list[Place]:
        import polars as pl

        if not self.watch.suspects(label):
            return [self._place(first, label.value)]
        wanted = pl.col(name) == label.value
        if self.roles.group:
            wanted &= pl.col(self.roles.group).eq_missing(pl.lit(label.group))
        rows = frame.filter(wanted)[_ROW].unique(maintain_order=True).head(MAX_PLACES)
        return [self._place(row, label.value) for row in rows]

    def _tokens(self, frame: pl.DataFrame, column: Column, *, targets: bool) -> Tokens:
        import polars as pl

        tokens = Tokens(column.name, targets=targets)
        flat = frame.select(_ROW, pl.col(column.name))
        while isinstance(flat.schema[column.name], (pl.List, pl.Array)):
            flat = flat.explode(column.name)
        flat = flat.drop_nulls()
        if not flat.schema[column.name].is_integer() or not flat.height:
            return tokens
        values = flat[column.name]
        low, high = values.min(), values.max()
        tokens.widen(low, high, len(values))  # type: ignore[arg-type]
        size = self.watch.expected.vocabulary
        if low >= 0 and (size is None or high < size):  # type: ignore[operator]
            return tokens
        wrong = pl.col(column.name) < 0
        if size is not None:
            wrong |= pl.col(column.name) >= size
        if targets:
            wrong &= ~pl.col(column.name).is_in(list(self.watch.ignored))
        outside = flat.filter(wrong)
        tokens.outside.count = outside.height
        for row, value in outside.head(MAX_PLACES).iter_rows():
            tokens.outside.first.append(self._place(row, value))
        return tokens

    def _feature(self, frame: pl.DataFrame, column: Column, ledger: Ledger) -> None:
        import polars as pl

        series = frame[column.name]
        if isinstance(series.dtype, (pl.List, pl.Array)):
            self._listed(frame, column, ledger)
            return
        if not series.dtype.is_numeric():
            return
        numbers = Numbers(column.name, whole=column.shape == "int")
        rows = frame[_ROW]
        if series.null_count():
            there = series.is_not_null()
            series, rows = series.filter(there), rows.filter(there)
        if series.dtype.is_decimal() or series.dtype == pl.Int128:
            series = series.cast(pl.Float64)
        numbers.add(series.to_numpy(), lambda at, value: self._place(rows[at], value))
        ledger.columns[column.name] = numbers

    def _listed(self, frame: pl.DataFrame, column: Column, ledger: Ledger) -> None:
        """Counts lists of numbers: as columns where all have one length, else as one."""
        import polars as pl

        name = column.name
        flat = frame.select(_ROW, name)
        depth = 0
        while isinstance(flat.schema[name], (pl.List, pl.Array)):
            flat, depth = flat.explode(name), depth + 1
        flat = flat.drop_nulls()
        if not flat.schema[name].is_numeric() or not flat.height:
            return
        width, left = divmod(flat.height, frame.height)
        counts = flat[_ROW].rle().struct.field("len") if depth == 1 and not left else None
        whole = column.shape == "ints"
        values = flat[name].to_numpy()
        if counts is not None and counts.n_unique() == 1 and width <= MAX_WIDTH:
            matrix = Matrix(name, width)
            matrix.add(values.reshape(frame.height, width))
            self._take(matrix, ledger, whole=whole)
            return
        numbers = Numbers(name, whole=whole, alone=False)
        rows = flat[_ROW]
        numbers.add(values, lambda at, value: self._place(rows[at], value))
        ledger.columns[name] = numbers

    def _take(self, matrix: Matrix, ledger: Ledger, *, whole: bool) -> None:
        for column in matrix.columns(whole=whole).values():
            column.bad.first = [self._place(p.record, p.value) for p in column.bad.first]
            if column.largest is not None:
                column.largest = self._place(column.largest.record, column.largest.value)
            ledger.columns[column.name] = column
        for place in matrix.zero.first:
            ledger.zero.add(self._place(place.record), 0)
        ledger.zero.count += matrix.zero.count

    def _zero_rows(self, frame: pl.DataFrame, ledger: Ledger) -> None:
        import polars as pl

        names = [c.name for c in self.roles.features if frame.schema[c.name].is_float()]
        if len(names) < MIN_ZERO_WIDTH:
            return
        zero = frame.filter(pl.all_horizontal(pl.col(names) == 0))[_ROW]
        ledger.zero.count += len(zero)
        ledger.zero.first += [self._place(row) for row in zero.head(MAX_PLACES)]


def _short(value: object) -> str:
    return str(value)[:80]


def _words() -> Any:
    import polars as pl

    return (pl.String, pl.Boolean, pl.Categorical, pl.Enum)
