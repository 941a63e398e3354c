"""Tables in files: CSV and TSV, Parquet and Arrow, block by block through polars.

A block of CSV that polars refuses is read row by row. Of Parquet and Arrow only the columns that
are looked at are read, some rows at a time.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
import os
import re
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from nanguard.check.data.columns import Column, ColumnRoles, Shape, roles_of
from nanguard.check.data.dataset import Ledger
from nanguard.check.data.records import RowReader, columns_of, is_missing, number_in
from nanguard.check.data.tables import (
    Block,
    FrameReader,
    blocks_of,
    in_order,
    line_count,
    one_per_record,
    parts_of,
)
from nanguard.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import polars as pl

    from nanguard.check.data.dataset import WatchedValues
    from nanguard.check.scan import Scan

SAMPLE_ROWS = 1000
REFUSED_BYTES = 256 << 10
REFUSED_PARTS = 8
MAX_CELL = 64 << 20
MAX_COLUMNS = 20_000
MAX_OPENED = 8  # quotes of one block that are never closed; each costs another reading of the rest
DELIMITERS = (",", "\t", ";", "|")
_WHOLE_NUMBER = re.compile(r"[ \t]*[-+]?[0-9]{1,18}[ \t]*")
_HEAD_BYTES = 1 << 20  # what a table's layout is judged by
ROWS = 1 << 17
MAX_MESSAGE = 1 << 30
UNLOOKED = 32 << 20  # bytes of the file that are decoded at once where nobody looks at them
_END = b"ARROW1"


@dataclass(frozen=True)
class Layout:
    """How a delimited file is written.

    Attributes:
        delimiter: What stands between two cells.
        names: The columns.
        header: How many lines come before the first record.
    """

    delimiter: str
    names: tuple[str, ...]
    header: int


def read_delimited(path: Path, watch: WatchedValues, scan: Scan) -> tuple[Ledger, ColumnRoles]:
    """Returns what a CSV or TSV file holds."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    returns = b"\n" not in head and b"\r" in head
    if returns:
        head = head.replace(b"\r", b"\n")
    if len(head) == _HEAD_BYTES:
        head = head[: head.rfind(b"\n") + 1]
    layout = layout_of(head)
    if len(layout.names) > MAX_COLUMNS:
        raise SourceError(
            f"its first line has {len(layout.names)} cells", where=str(path), do="Leave it out."
        )
    roles = roles_of(columns_of(_sample(head, layout)), watch.expected)
    if not roles.names:
        names = [Column(name, "empty") for name in layout.names]
        roles = roles_of(names, watch.expected)
    reader = _DelimitedReader(layout, roles, watch)
    ledger = Ledger()
    first = True
    blocks = _blocks_of_returns(path) if returns else blocks_of(path)
    for part in in_order(reader.read, _balanced(blocks, layout), path, scan):
        if first:
            ledger.lines, first = layout.header, False
        ledger.merge(part)
    return ledger, roles


def _blocks_of_returns(path: Path) -> Iterator[Block]:
    """Yields the blocks of a file whose lines end in a carriage return, as on old Macs."""
    with path.open("rb") as file:
        rest, dropped = b"", False  # whether the line at hand is too long, and was reported
        while data := file.read(_HEAD_BYTES).replace(b"\r", b"\n"):
            if dropped:
                _, ended, data = data.partition(b"\n")
                dropped = not ended
            whole, ended, rest = (rest + data).rpartition(b"\n")
            if ended:
                yield Block(whole + ended)
            if len(rest) > MAX_CELL:
                yield Block(rest[:1024], overlong=True)
                rest, dropped = b"", True
        if rest:
            yield Block(rest)


def layout_of(head: bytes) -> Layout:
    """Returns how a delimited file is written, judged by its beginning."""
    text = head.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace")
    lines = [line for line in text.splitlines()[:20] if line.strip()]
    while len(lines) > 1 and _is_comment(lines):
        del lines[0]
    first = lines[0] if lines else ""
    delimiter = max(DELIMITERS, key=lambda one: (_columns_by(one, lines), first.count(one)))
    cells = _cells(first, delimiter)
    usual = _usual_width(lines[1:], delimiter)
    if usual is not None and usual != len(cells):
        named = cells if len(cells) == usual - 1 else [f"column {at}" for at in range(2, usual + 1)]
        return Layout(
            delimiter, _unique(["column 1", *named]), text[: text.find(first)].count("\n") + 1
        )
    if _is_header(cells, _cells(lines[1], delimiter) if len(lines) > 1 else []):
        return Layout(delimiter, _unique(cells), text[: text.find(first)].count("\n") + 1)
    return Layout(delimiter, tuple(f"column {at}" for at in range(1, len(cells) + 1)), 0)


def _is_comment(lines: list[str]) -> bool:
    """Returns whether the first line is a remark above the header, as monitors of games write it.

    A header may begin with the sign as well; it then has as many cells as the lines below.
    """
    if not lines[0].startswith("#"):
        return False
    below = lines[1:6]
    return all(
        len(_cells(lines[0], one)) != len(_cells(line, one))
        for one in DELIMITERS
        for line in below
        if one in line
    )


def _usual_width(lines: list[str], delimiter: str) -> int | None:
    """Returns how many cells lines have where nearly all agree; None where they do not."""
    widths = [len(_cells(line, delimiter)) for line in lines if '"' not in line]
    most = max(set(widths), key=widths.count) if widths else 0
    return most if len(widths) >= 4 and widths.count(most) >= 0.9 * len(widths) else None


def _columns_by(delimiter: str, lines: list[str]) -> int:
    """Returns how many of the first lines a delimiter cuts into as many cells as the first."""
    wanted = lines[0].count(delimiter) if lines else 0
    return sum(line.count(delimiter) == wanted for line in lines) if wanted else 0


def _unique(cells: list[str]) -> tuple[str, ...]:
    names: dict[str, None] = {}
    for at, cell in enumerate(cells, 1):
        name = cell.strip() or f"column {at}"
        names[name if name not in names else f"{name} ({at})"] = None
    return tuple(names)


def _cells(line: str, delimiter: str) -> list[str]:
    try:
        return next(csv.reader([line], delimiter=delimiter), [])
    except csv.Error:
        return [line]


def _is_header(cells: list[str], below: list[str]) -> bool:
    """Returns whether a line names columns: by text above numbers, or by nothing but text."""
    texts = [number_in(cell) is None and not is_missing(cell) for cell in cells]
    if len(cells) == len(below) and any(texts):
        numbers = [number_in(cell) is not None for cell in below]
        if any(text and number for text, number in zip(texts, numbers, strict=True)):
            return True
    return any(texts) and all(number_in(cell) is None for cell in cells)


def _sample(head: bytes, layout: Layout) -> list[dict[str, Any]]:
    text = head.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace")
    out = []
    try:
        for at, cells in enumerate(csv.reader(io.StringIO(text), delimiter=layout.delimiter)):
            if at >= layout.header and len(cells) == len(layout.names):
                values = {n: value_of(c) for n, c in zip(layout.names, cells, strict=True)}
                out.append({name: _telling(value) for name, value in values.items()})
            if len(out) >= SAMPLE_ROWS:
                break
    except csv.Error:
        return out
    return out


def _telling(value: float | str | None) -> float | str | None:
    """Returns a value if it tells what its column holds; NaN may stand among texts as well."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def value_of(cell: str) -> int | float | str | None:
    """Returns what a cell means: a number, a text, or None for no value."""
    if _WHOLE_NUMBER.fullmatch(cell):
        return int(cell)
    number = number_in(cell)
    if number is not None:
        return number
    return None if is_missing(cell) else cell


def _balanced(blocks: Iterator[Block], layout: Layout) -> Iterator[Block]:
    """Yields blocks without the header, each with as many opening quotes as closing ones."""
    held, skip = b"", layout.header
    for block in blocks:
        data = block.data.removeprefix(b"\xef\xbb\xbf")
        while skip and data:
            data = data[data.find(b"\n") + 1 :] if b"\n" in data else b""
            skip -= 1
        held += data
        if held.count(b'"') % 2 == 0 or len(held) > 8 * len(block.data):
            yield Block(held, block.overlong)
            held = b""
    if held:
        yield Block(held)


@dataclass(frozen=True)
class _DelimitedReader:
    layout: Layout
    roles: ColumnRoles
    watch: WatchedValues

    def read(self, block: Block) -> Ledger:
        """Returns what a block holds."""
        if block.overlong:
            return Ledger.overlong()
        if b'"' in block.data:
            return self._whole(block.data)
        return self._lines(block.data)

    def _whole(self, data: bytes) -> Ledger:
        """Reads a block with quotes, which cannot be cut where a line ends."""
        import polars as pl

        if data.count(b'"') % 2:
            return self._slow(data)
        try:
            return self._fast(data)
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException, _UnevenError):
            return self._slow(data)

    def _lines(self, data: bytes) -> Ledger:
        import polars as pl

        try:
            return self._fast(data)
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException, _UnevenError):
            if len(data) <= REFUSED_BYTES:
                return self._slow(data)
        ledger = Ledger()
        for part in parts_of(data, REFUSED_PARTS):
            ledger.merge(self._lines(part))
        return ledger

    def _fast(self, data: bytes) -> Ledger:
        import polars as pl

        lines = line_count(data)
        gaps = lines * (len(self.layout.names) - 1)
        if b'"' not in data and data.count(self.layout.delimiter.encode()) != gaps:
            raise _UnevenError
        wanted = {column.name: pl.Float64 for column in self.roles.features}
        if self.roles.label is not None:
            wanted[self.roles.label.name] = _dtype(self.roles.label)
        frame = pl.read_csv(
            data,
            has_header=False,
            schema={name: wanted.get(name, pl.String) for name in self.layout.names},
            separator=self.layout.delimiter,
            truncate_ragged_lines=False,
        )
        if frame.height != lines:
            raise _UnevenError
        ledger = FrameReader(self.roles, self.watch, one_per_record).read(frame)
        ledger.lines = lines
        return ledger

    def _slow(self, data: bytes) -> Ledger:
        reader = RowReader(self.roles, self.watch)
        csv.field_size_limit(max(csv.field_size_limit(), MAX_CELL))
        lines = io.StringIO(data.decode("utf-8", "replace"), newline="").readlines()
        start = 0
        for _ in range(MAX_OPENED):
            start = self._rows(lines, start, reader)
            if start >= len(lines):
                break
        else:
            reader.ledger.refuse(start + 1, "what follows quotes that are never closed")
        ledger = reader.finish()
        ledger.lines = data.count(b"\n") + (not data.endswith(b"\n"))
        return ledger

    def _rows(self, lines: list[str], start: int, reader: RowReader) -> int:
        """Reads rows from a line on; returns where to go on after a quote that is never closed."""
        rows = csv.reader(itertools.islice(lines, start, None), delimiter=self.layout.delimiter)
        line = start + 1
        while True:
            try:
                cells = next(rows)
            except StopIteration:
                return len(lines)
            except csv.Error as error:
                reader.ledger.refuse(line, str(error))
                line = start + rows.line_num + 1
                continue
            after = start + rows.line_num + 1
            if after > len(lines) and self._is_open(lines[line - 1 :]):
                reader.ledger.refuse(line, "the quote that opens here is never closed")
                reader.ledger.damaged = True
                return line
            if any(cells) and not (len(cells) < len(self.layout.names) and cells[0][:1] == "#"):
                self._row(cells, line, reader)
            line = after

    def _is_open(self, lines: list[str]) -> bool:
        """Returns whether the last row, given by its lines, ends inside a quote."""
        if '"' not in lines[0]:
            return False
        # One more quote closes an open row; behind a row that is whole it begins another.
        rows = csv.reader(itertools.chain(lines, ('"',)), delimiter=self.layout.delimiter)
        try:
            return sum(1 for _ in rows) == 1
        except csv.Error:
            return False

    def _row(self, cells: list[str], line: int, reader: RowReader) -> None:
        names = self.layout.names
        if len(cells) != len(names):
            mark = cells[0].startswith(("<<<<<<<", ">>>>>>>", "=======", "|||||||"))
            why = (
                f"mark of an unfinished merge: {cells[0][:30]}"
                if mark
                else (f"{len(cells)} cells where the header has {len(names)}")
            )
            reader.ledger.refuse(line, why)
            reader.ledger.conflict |= mark
        elif self.layout.header and tuple(cell.strip() for cell in cells) == names:
            reader.ledger.refuse(line, "the header again")
        else:
            values = {name: value_of(c) for name, c in zip(names, cells, strict=True)}
            reader.add(values, line)


class _UnevenError(Exception):
    """A block whose rows do not all have the cells of the header."""


def _dtype(column: Column) -> Any:
    import polars as pl

    types: dict[str, Any] = {"int": pl.Int64, "float": pl.Float64}
    return types.get(column.shape, pl.String)


def read_parquet(path: Path, watch: WatchedValues, scan: Scan) -> tuple[Ledger, ColumnRoles]:
    """Returns what a Parquet file holds."""
    import polars as pl

    return _read_lazy(pl.scan_parquet(path), path, watch, scan)


def read_arrow(path: Path, watch: WatchedValues, scan: Scan) -> tuple[Ledger, ColumnRoles]:
    """Returns what an Arrow file holds, be it of the file format or a stream.

    The file format is a stream between two marks, so both are read batch by batch. Some writers
    leave out what a stream needs between them; such a file is read by its table of contents.
    """
    import polars as pl

    with path.open("rb") as file:
        start = file.read(12)
        file.seek(-min(len(_END), file.seek(0, 2)), 2)
        end = file.read()
    if start.startswith(_END) and end != _END:
        raise _broken(path)
    if start.startswith(_END) and start[8:] != b"\xff\xff\xff\xff":
        return _read_lazy(pl.scan_ipc(path), path, watch, scan)
    ledger, roles = Ledger(), None
    for batch in _batches(path):
        frame = pl.read_ipc_stream(io.BytesIO(batch))
        if roles is None:
            roles = roles_of(columns_in(frame.schema), watch.expected)
        if roles.read:
            ledger.merge(FrameReader(roles, watch).read(frame.select(roles.read)))
        else:
            ledger.records += frame.height
        scan.progress(str(path), len(batch))
    return ledger, roles or ColumnRoles()


def columns_in(schema: pl.Schema) -> list[Column]:
    """Returns the columns of a table as they are told apart everywhere else."""
    return [Column(name, *_shape(dtype)) for name, dtype in schema.items()]


def _shape(dtype: Any) -> tuple[Shape, int]:
    import polars as pl

    depth = 0
    while isinstance(dtype, (pl.List, pl.Array)):
        dtype, depth = dtype.inner, depth + 1
    shape: Shape = "other"
    if dtype.is_integer():
        shape = "ints" if depth else "int"
    elif dtype.is_float() or dtype.is_decimal():
        shape = "floats" if depth else "float"
    elif dtype in (pl.String, pl.Categorical, pl.Enum):
        shape = "texts" if depth else "text"
    elif dtype == pl.Boolean:
        shape = "ints" if depth else "bool"
    elif dtype == pl.Null:
        shape = "empty"
    return shape, depth


def _read_lazy(
    lazy: pl.LazyFrame, path: Path, watch: WatchedValues, scan: Scan
) -> tuple[Ledger, ColumnRoles]:
    import polars as pl

    roles = roles_of(columns_in(lazy.collect_schema()), watch.expected)
    total = int(lazy.select(pl.len()).collect().item())
    ledger = Ledger(records=0 if roles.read else total)
    reader = FrameReader(roles, watch)
    size, step = path.stat().st_size, max(1, _step(roles))
    for start in range(0, total if roles.read else 0, step):
        ledger.merge(reader.read(_slice(lazy, roles.read, start, step, total, path)))
        scan.progress(str(path), size * min(step, total - start) // total)
    _decode_others(lazy, set(roles.read), total, path)
    return ledger, roles


def _decode_others(lazy: pl.LazyFrame, known: set[str], total: int, path: Path) -> None:
    """Decodes the columns that no rule looks at: a loader will, and it fails where this does."""
    step = max(1, UNLOOKED * total // max(1, path.stat().st_size))
    for name in lazy.collect_schema():
        for start in range(0, total if name not in known else 0, step):
            _slice(lazy, [name], start, step, total, path)


def _slice(
    lazy: pl.LazyFrame, names: Sequence[str], start: int, step: int, total: int, path: Path
) -> pl.DataFrame:
    """Returns some rows of some columns.

    Raises:
        SourceError: There are fewer than the file promises.
    """
    wanted = lazy.select(names)
    if start or step < total:  # a slice of all rows would hide that there are more in some group
        wanted = wanted.slice(start, step)
    frame = wanted.collect()
    if frame.height != min(step, total - start):
        raise SourceError(
            f"the file promises {total} rows and ends after {start + frame.height}",
            where=str(path),
            do="Write the file again.",
        )
    return frame


def _step(roles: ColumnRoles) -> int:
    listed = sum(column.depth > 0 for column in (*roles.features, *roles.tokens))
    return ROWS // (16 if listed else max(1, len(roles.read) // 16))


def _batches(path: Path) -> Iterator[bytes]:
    """Yields a stream of Arrow messages as streams of one batch each."""
    schema, dictionaries, any_batch = b"", b"", False
    with path.open("rb") as file:
        if file.read(8)[:6] != b"ARROW1":
            file.seek(0)
        while message := _message(file, path):
            kind, data = message
            if kind == 1 and not schema:
                schema = data
            elif kind == 2:
                dictionaries += data
            elif kind == 3:
                any_batch = True
                yield schema + dictionaries + data + b"\xff\xff\xff\xff\0\0\0\0"
            else:  # another schema, a tensor, or a kind that there is not: no table holds them
                raise _broken(path)
    if schema and not any_batch:
        yield schema + b"\xff\xff\xff\xff\0\0\0\0"


def _message(file: IO[bytes], path: Path) -> tuple[int, bytes] | None:
    """Returns the kind of the next message of a stream and its bytes; None at the end."""
    start = file.read(8)
    if not start:
        return None
    if len(start) < 8 or start[:4] != b"\xff\xff\xff\xff":
        raise _broken(path)
    size = int.from_bytes(start[4:], "little", signed=True)
    if size == 0:
        return None
    meta = _exactly(file, size, path)
    kind, length = _header(meta, path)
    return kind, start + meta + _exactly(file, length, path)


def _exactly(file: IO[bytes], size: int, path: Path) -> bytes:
    """Returns the next bytes of a file; what is not there takes no memory."""
    left = os.fstat(file.fileno()).st_size - file.tell()
    if not 0 <= size <= min(left, MAX_MESSAGE):
        raise _broken(path)
    data = file.read(size)
    if len(data) < size:  # it was cut meanwhile
        raise _broken(path)
    return data


def _header(meta: bytes, path: Path) -> tuple[int, int]:
    """Returns the kind and the length of what follows, from a message's own table."""

    def at(place: int, size: int, *, signed: bool = False) -> int:
        if place < 0 or place + size > len(meta):
            raise _broken(path)
        return int.from_bytes(meta[place : place + size], "little", signed=signed)

    def fields(table: int) -> list[int]:
        places = table - at(table, 4, signed=True)
        offsets = [at(places + 4 + 2 * n, 2) for n in range((at(places, 2) - 4) // 2)][:4]
        return [table + offset if offset else 0 for offset in offsets] + [0] * (4 - len(offsets))

    _version, of_kind, header, of_length = fields(at(0, 4))
    kind = at(of_kind, 1) if of_kind else 0
    if kind == 2 and header:
        is_delta = fields(header + at(header, 4))[2]
        if is_delta and at(is_delta, 1):  # words that are added to a dictionary: polars takes none
            raise _broken(path)
    return kind, at(of_length, 8, signed=True) if of_length else 0


def _broken(path: Path) -> SourceError:
    return SourceError(
        "the file ends, or is damaged, in the middle of a table",
        where=str(path),
        do="Write the file again.",
    )
