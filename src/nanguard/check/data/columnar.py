"""Parquet and Arrow: some rows at a time, only the columns that are looked at."""

from __future__ import annotations

import io
from typing import IO, TYPE_CHECKING, Any

from nanguard.check.data.columns import Column, ColumnRoles, Shape, roles_of
from nanguard.check.data.dataset import Ledger
from nanguard.check.data.tables import FrameReader
from nanguard.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import polars as pl

    from nanguard.check.data.dataset import WatchedValues
    from nanguard.check.scan import Scan

ROWS = 1 << 17
MAX_MESSAGE = 1 << 30
UNLOOKED = 32 << 20  # bytes of the file that are decoded at once where nobody looks at them
_END = b"ARROW1"


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
    frame = lazy.select(names).slice(start, step).collect()
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
            if kind == 1:
                schema = data
            elif kind == 2:
                dictionaries += data
            elif kind == 3:
                any_batch = True
                yield schema + dictionaries + data + b"\xff\xff\xff\xff\0\0\0\0"
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
    if not 0 < size <= MAX_MESSAGE:
        raise _broken(path)
    meta = file.read(size)
    kind, length = _header(meta, path)
    body = file.read(length)
    if len(meta) < size or len(body) < length:
        raise _broken(path)
    return kind, start + meta + body


def _header(meta: bytes, path: Path) -> tuple[int, int]:
    """Returns the kind and the length of what follows, from a message's own table."""

    def at(place: int, size: int, *, signed: bool = False) -> int:
        if place < 0 or place + size > len(meta):
            raise _broken(path)
        return int.from_bytes(meta[place : place + size], "little", signed=signed)

    table = at(0, 4)
    fields = table - at(table, 4, signed=True)
    offsets = [at(fields + 4 + 2 * n, 2) for n in range((at(fields, 2) - 4) // 2)][:4]
    if len(offsets) < 2:
        raise _broken(path)
    length = at(table + offsets[3], 8, signed=True) if len(offsets) > 3 and offsets[3] else 0
    if not 0 <= length <= MAX_MESSAGE:
        raise _broken(path)
    return at(table + offsets[1], 1), length


def _broken(path: Path) -> SourceError:
    return SourceError(
        "the file ends, or is damaged, in the middle of a table",
        where=str(path),
        do="Write the file again.",
    )
