"""Tables and matrices, read in blocks by several threads and counted column by column."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, TypeVar

from nanguard.check.data.columns import (
    MAX_PLACES,
    SAMPLED,
    ColumnNumbers,
    Label,
    LabelColumn,
    RowPlace,
    RowPlaces,
    Tokens,
    label_of,
)
from nanguard.check.data.dataset import Ledger

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    import polars as pl

    from nanguard.check.data.columns import Column, ColumnRoles
    from nanguard.check.data.dataset import WatchedValues
    from nanguard.check.scan import Scan

TEXT_BLOCK_BYTES = 16 << 20
MAX_RECORD_BYTES = 64 << 20  # a longer line is no record of a data set
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Block:
    """Some lines of a file.

    Attributes:
        data: The lines, each with its end.
        overlong: Whether this is the beginning of a line that is too long to be read.
    """

    data: bytes
    overlong: bool = False


def blocks_of(path: Path, size: int = TEXT_BLOCK_BYTES) -> Iterator[Block]:
    """Yields a file's lines in blocks; a line that is too long comes as a block of its own.

    Where a block ends is found before it is read, so that nothing has to be copied.
    """
    with path.open("rb", buffering=1 << 16) as file:
        start, end = 0, file.seek(0, 2)
        while start < end:
            file.seek(min(start + size, end) - 1)
            last = file.readline(MAX_RECORD_BYTES)
            stop = file.tell()
            file.seek(start)
            if last.endswith(b"\n") or stop >= end:
                yield Block(file.read(stop - start))
                start = stop
                continue
            data = file.read(size)
            cut = data.rfind(b"\n") + 1
            if cut:
                yield Block(data[:cut])
            file.seek(stop)
            start = _end_of_line(file, size)
            yield Block(data[cut : cut + 1024], overlong=True)


def _end_of_line(file: IO[bytes], size: int) -> int:
    """Passes over the rest of a line, and returns where the next one begins."""
    while not (part := file.readline(size)).endswith(b"\n"):
        if not part:
            break
    return file.tell()


def in_order(
    work: Callable[[Block], Result], blocks: Iterable[Block], path: Path, scan: Scan
) -> Iterator[Result]:
    """Yields what is made of each block, in order, while others are being worked on.

    Args:
        work: Makes a result of a block.
        blocks: The blocks.
        path: The file, for the progress.
        scan: How many threads there are, and where progress goes.
    """
    if scan.threads <= 1:
        for block in blocks:
            yield work(block)
            scan.progress(str(path), len(block.data))
        return
    waiting: deque[tuple[Future[Result], int]] = deque()
    with ThreadPoolExecutor(scan.threads) as pool:
        for block in blocks:
            waiting.append((pool.submit(work, block), len(block.data)))
            if len(waiting) > scan.threads:
                future, read = waiting.popleft()
                yield future.result()
                scan.progress(str(path), read)
        while waiting:
            future, read = waiting.popleft()
            yield future.result()
            scan.progress(str(path), read)


def line_count(data: bytes) -> int:
    """Returns how many lines a block has; the last may lack its end."""
    import numpy as np

    ends = int(np.count_nonzero(np.frombuffer(data, dtype=np.uint8) == ord("\n")))
    return ends + (not data.endswith(b"\n"))


def line_starts(data: bytes) -> list[int]:
    """Returns where the lines of a block begin."""
    starts, at = [0], data.find(b"\n")
    while at >= 0:
        starts.append(at + 1)
        at = data.find(b"\n", at + 1)
    if starts[-1] == len(data):
        starts.pop()
    return starts


def parts_of(data: bytes, count: int) -> list[bytes]:
    """Returns a block in parts that end where a line ends."""
    size, parts, at = max(1, len(data) // count), [], 0
    while at < len(data):
        cut = data.find(b"\n", min(at + size, len(data) - 1)) + 1
        end = cut or len(data)
        parts.append(data[at:end])
        at = end
    return parts


MAX_WIDTH = 4096  # wider rows are images or sequences, whose columns mean nothing by themselves
MIN_ZERO_WIDTH = 4


class Matrix:
    """The columns of rows of numbers.

    Args:
        name: The name of the array.
        width: How many columns there are.
    """

    def __init__(self, name: str, width: int) -> None:
        import numpy as np

        self.name = name
        self.width = width
        self.rows = 0
        self.low = np.full(width, np.inf)
        self.high = np.full(width, -np.inf)
        self.logs = np.zeros(width)
        self.squares = np.zeros(width)
        self.sampled = 0
        self.zeros = np.zeros(width, dtype="int64")
        self.bad: dict[int, RowPlaces] = {}
        self.zero = RowPlaces()
        self._largest: dict[int, RowPlace] = {}

    def add(self, rows: Any, first: int = 0) -> None:
        """Notes rows, a NumPy array of two dimensions.

        Args:
            rows: The rows.
            first: The record of the first one.
        """
        import numpy as np

        if not rows.size:
            return
        low, high = rows.min(axis=0).astype("float64"), rows.max(axis=0).astype("float64")
        for column in np.flatnonzero(~(np.isfinite(low) & np.isfinite(high))):
            low[column], high[column] = self._bad(rows[:, column], int(column), first)
        self._note_largest(rows, low, high, first)
        self.low, self.high = np.minimum(self.low, low), np.maximum(self.high, high)
        self.rows += len(rows)
        self._sample(rows[:: max(1, len(rows) // SAMPLED)])
        self._zero_rows(rows, first)

    def _bad(self, values: Any, column: int, first: int) -> tuple[float, float]:
        import numpy as np

        fine = np.isfinite(values)
        wrong = np.flatnonzero(~fine)
        places = self.bad.setdefault(column, RowPlaces())
        for at in wrong[:MAX_PLACES]:
            places.add(RowPlace(first + int(at), None, str(float(values[at]))), 0)
        places.count += int(wrong.size)
        kept = values[fine]
        return (float(kept.min()), float(kept.max())) if kept.size else (np.inf, -np.inf)

    def _note_largest(self, rows: Any, low: Any, high: Any, first: int) -> None:
        """Notes where a column grew beyond what it was by far, which is rare."""
        import numpy as np

        now = np.maximum(np.abs(low), np.abs(high))
        before = np.maximum(np.abs(self.low), np.abs(self.high))
        before[~np.isfinite(before)] = 0.0
        for column in np.flatnonzero(np.isfinite(now) & (now > 1e4) & (now > before)):
            sizes = np.abs(np.where(np.isfinite(rows[:, column]), rows[:, column], 0))
            at = int(sizes.argmax())
            self._largest[int(column)] = RowPlace(
                first + at, None, f"{float(rows[at, column]):.4g}"
            )

    def _sample(self, rows: Any) -> None:
        import numpy as np

        sizes = np.abs(rows.astype("float64"))
        usable = np.isfinite(sizes) & (sizes > 0)
        logs = np.log2(np.where(usable, sizes, 1.0))
        self.logs += logs.sum(axis=0)
        self.squares += (logs * logs).sum(axis=0)
        self.sampled += len(rows)
        self.zeros += (~usable).sum(axis=0)

    def _zero_rows(self, rows: Any, first: int) -> None:
        import numpy as np

        if self.width < MIN_ZERO_WIDTH:
            return
        maybe = np.flatnonzero(rows[:, 0] == 0)
        for at in maybe[~rows[maybe].any(axis=1)] if maybe.size else ():
            self.zero.add(RowPlace(first + int(at), None))

    def columns(self, *, whole: bool) -> dict[str, ColumnNumbers]:
        """Returns each column as it would be if it stood alone."""
        out = {}
        for at in range(self.width):
            name = self.name if self.width == 1 else f"{self.name}[{at}]"
            out[name] = ColumnNumbers(
                name,
                count=self.rows,
                bad=self.bad.get(at, RowPlaces()),
                low=float(self.low[at]),
                high=float(self.high[at]),
                largest=self._largest.get(at),
                zeros=int(self.zeros[at]),
                sampled=self.sampled,
                logs=float(self.logs[at]),
                squares=float(self.squares[at]),
                whole=whole,
            )
        return out


Lines = Callable[[int], int | None]
MANY_FRACTIONS = 1000  # different fractions in one block: measurements, not classes
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

    roles: ColumnRoles
    watch: WatchedValues
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

    def _place(self, row: int, value: object = "") -> RowPlace:
        return RowPlace(row, self.lines(row), _short(value))

    def _labels(self, frame: pl.DataFrame, column: Column) -> LabelColumn:
        import polars as pl

        name, group = column.name, self.roles.group
        labels = LabelColumn(name, many=column.depth > 0)
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

    def _finite(self, frame: pl.DataFrame, labels: LabelColumn) -> pl.DataFrame:
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

    def _measured(self, values: pl.Series, labels: LabelColumn) -> bool:
        """Notes labels that are measurements; returns whether they are."""
        sample = values.head(4 * MANY_FRACTIONS)
        if (
            sample.n_unique() <= MANY_FRACTIONS
            or self.watch.classes(None)
            or self.watch.expected.groups
        ):
            return False
        labels.overflowed = True
        labels.total += len(values)
        labels.fractional += int((values != values.round()).sum())
        return True

    def _label_places(
        self, frame: pl.DataFrame, label: Label, name: str, first: int
    ) -> list[RowPlace]:
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
        numbers = ColumnNumbers(column.name, whole=column.shape == "int")
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
        numbers = ColumnNumbers(name, whole=whole, alone=False)
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
