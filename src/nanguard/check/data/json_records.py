"""JSON lines, whole blocks through polars, and JSON files that are one list of records."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanguard.check.data.columns import Column, ColumnRoles, Label, LabelColumn, RowPlace, roles_of
from nanguard.check.data.dataset import Ledger
from nanguard.check.data.records import RowReader, columns_of, speakable
from nanguard.check.data.tables import (
    Block,
    FrameReader,
    Lines,
    blocks_of,
    in_order,
    line_count,
    line_starts,
    one_per_record,
    parts_of,
)
from nanguard.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nanguard.check.data.dataset import WatchedValues
    from nanguard.check.scan import Scan

SAMPLE_LINES = 200
REFUSED_LINE_BYTES = 256 << 10  # a block of this size that polars refuses is read line by line
REFUSED_LINE_PARTS = 8
_ROW, _COUNT = "__row", "__count"


def read_jsonl(path: Path, watch: WatchedValues, scan: Scan) -> tuple[Ledger, ColumnRoles]:
    """Returns what a file of JSON lines holds."""
    roles = roles_of(columns_of(_sample(path)), watch.expected)
    reader = _JsonLinesReader(roles, watch)
    ledger = Ledger()
    for part in in_order(reader.read, blocks_of(path), path, scan):
        ledger.merge(part)
    return ledger, roles


def records_in(data: bytes, limit: int) -> Iterator[dict[str, Any]]:
    """Yields the first records of some lines; lines that cannot be read are passed over."""
    for line in data.splitlines()[:limit]:
        value, _ = parsed(line)
        if isinstance(value, dict):
            yield value


def parsed(line: bytes) -> tuple[Any, str | None]:
    """Returns what a line of JSON means, and why it cannot be read; one of them is None."""
    try:
        value = json.loads(line)
        return speakable(value) if b"\\u" in line else value, None
    except UnicodeDecodeError:
        return None, "not UTF-8"
    except RecursionError:
        return None, "nested too deep"
    except ValueError as error:
        return None, _why(line, error)


def _why(line: bytes, error: ValueError) -> str:
    if line.startswith((b"<<<<<<<", b">>>>>>>", b"=======", b"|||||||")):
        return f"mark of an unfinished merge: {line[:30].decode('utf-8', 'replace').strip()}"
    reason = error.msg if isinstance(error, json.JSONDecodeError) else "a number with many digits"
    return f"not JSON: {reason}"


def _sample(path: Path) -> list[dict[str, Any]]:
    """Returns records from the beginning of a file."""
    with path.open("rb") as file:
        head = file.read(4 << 20)
    return list(records_in(head.removeprefix(b"\xef\xbb\xbf"), SAMPLE_LINES))


@dataclass(frozen=True)
class _JsonLinesReader:
    roles: ColumnRoles
    watch: WatchedValues

    def read(self, block: Block) -> Ledger:
        """Returns what a block holds."""
        if block.overlong:
            return Ledger.overlong()
        return self._lines(block.data.removeprefix(b"\xef\xbb\xbf"))

    def _lines(self, data: bytes) -> Ledger:
        import polars as pl

        try:
            return self._fast(data)
        # A lone surrogate in a name is JSON, and no text that polars can take.
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException, UnicodeError):
            if len(data) <= REFUSED_LINE_BYTES:
                return self._slow(data)
        ledger = Ledger()
        for part in parts_of(data, REFUSED_LINE_PARTS):
            ledger.merge(self._lines(part))
        return ledger

    def _fast(self, data: bytes) -> Ledger:
        import polars as pl

        schema = {column.name: _dtype(column) for column in self._columns()}
        schema |= {column.name: _number(column) for column in self.roles.features}
        if not schema and self.roles.names:
            schema = {self.roles.names[0]: pl.String()}
        if not schema or not data or data.isspace():
            return self._slow(data)
        lines = line_count(data)
        if (counted := self._counted(data, schema, lines)) is not None:
            return counted
        frame = pl.read_ndjson(data, schema=schema)
        line_of: Lines = one_per_record
        if frame.height != lines:
            filled = _filled(data)
            if len(filled) != frame.height:
                return self._slow(data)
            line_of = filled.__getitem__
        ledger = FrameReader(self.roles, self.watch, line_of).read(frame)
        ledger.lines = lines
        return ledger

    def _counted(self, data: bytes, schema: dict[str, Any], lines: int) -> Ledger | None:
        """Returns what a block holds that has nothing but labels, all of them as they should be.

        Counting while parsing saves a third of the time; None where places are worth noting.
        """
        import polars as pl

        label, group = self.roles.label, self.roles.group
        others = self.roles.features or self.roles.tokens or self.roles.targets
        if label is None or others or label.shape != "int":
            return None
        keys = [label.name, group] if group else [label.name]
        rows = pl.scan_ndjson(data, schema=schema, row_index_name=_ROW)
        table = rows.group_by(keys).agg(pl.len().alias(_COUNT), pl.col(_ROW).min())
        labels = LabelColumn(label.name)
        for value, *named, count, first in table.collect(engine="streaming").sort(_ROW).iter_rows():
            if value is None:
                return None
            one = Label(named[0] if named else None, "int", value)
            if self.watch.suspects(one):
                return None
            labels.add(one, count, [RowPlace(first, first + 1, str(value))])
        if labels.total != lines:
            return None
        return Ledger(records=lines, lines=lines, labels=labels)

    def _columns(self) -> Iterator[Column]:
        roles = self.roles
        yield from roles.features
        yield from roles.tokens
        for column in (roles.label, roles.targets):
            if column is not None:
                yield column
        if roles.group is not None:
            yield Column(roles.group, "text")

    def _slow(self, data: bytes) -> Ledger:
        reader = RowReader(self.roles, self.watch)
        number = 0
        for number, line in enumerate(data.split(b"\n"), 1):
            if not line.strip():
                continue
            value, why = parsed(line)
            if isinstance(value, dict):
                reader.add(value, number)
            else:
                reader.ledger.refuse(number, why or f"a {type(value).__name__}, not an object")
                reader.ledger.conflict |= line.startswith((b"<<<<<<<", b">>>>>>>"))
        ledger = reader.finish()
        ledger.lines = number - data.endswith(b"\n")
        return ledger


def _filled(data: bytes) -> list[int]:
    """Returns the lines that are not blank, counted from 1."""
    starts = line_starts(data)
    ends = [*starts[1:], len(data)]
    return [
        number
        for number, (start, end) in enumerate(zip(starts, ends, strict=True), 1)
        if data[start:end].strip()
    ]


def _dtype(column: Column) -> Any:
    import polars as pl

    base: Any = {
        "int": pl.Int64,
        "ints": pl.Int64,
        "float": pl.Float64,
        "floats": pl.Float64,
        "bool": pl.Boolean,
    }.get(column.shape, pl.String)
    return _nested(base, column.depth)


def _number(column: Column) -> Any:
    import polars as pl

    return _nested(pl.Float64, column.depth)


def _nested(base: Any, depth: int) -> Any:
    import polars as pl

    for _ in range(depth):
        base = pl.List(base)
    return base


MAX_LIST_BYTES = 256 << 20  # such a file has to be held as a whole
SAMPLE = 200


def read_json_list(path: Path, watch: WatchedValues, scan: Scan) -> tuple[Ledger, ColumnRoles]:
    """Returns what a JSON file with a list of records holds."""
    size = path.stat().st_size
    if size > MAX_LIST_BYTES:
        raise SourceError(
            f"a list of {size} bytes cannot be read in parts",
            where=str(path),
            do="Save it as JSON lines, one record in each.",
        )
    data = path.read_bytes()
    text = data.decode("utf-8-sig", "replace")
    records, broken = _records(text)
    if broken is None and (at := _foreign(data)) is not None:
        broken = "not UTF-8", 1 + data.count(b"\n", 0, at)
    sample = [speakable(value) for value, _ in records[:SAMPLE] if isinstance(value, dict)]
    columns = columns_of(sample)
    roles = roles_of(columns, watch.expected)
    reader = RowReader(roles, watch)
    for value, line in records:
        if isinstance(value, dict):
            reader.add(speakable(value), line)
        else:
            reader.ledger.refuse(line, f"a {type(value).__name__}, not an object")
    if broken is not None:
        reader.ledger.refuse(broken[1], broken[0])
        reader.ledger.damaged = True
    scan.progress(str(path), size)
    return reader.finish(), roles


def _records(text: str) -> tuple[list[tuple[Any, int]], tuple[str, int] | None]:
    """Returns the members of a list with their lines, and where it breaks off."""
    decoder = json.JSONDecoder()
    out: list[tuple[Any, int]] = []
    at, line, counted = text.find("[") + 1, 1, 0
    while True:
        at = _past_space(text, at)
        line += text.count("\n", counted, at)
        counted = at
        if not out and text[at : at + 1] == "]":
            return out, _after(text, at + 1, line)
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            why = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deep"
            return out, (f"not JSON: {why}", line)
        out.append((value, line))
        at = _past_space(text, at)
        line += text.count("\n", counted, at)
        counted = at
        if text[at : at + 1] == "]":
            return out, _after(text, at + 1, line)
        if text[at : at + 1] != ",":
            return out, ("not JSON: the list is not closed", line)
        at += 1


def _after(text: str, at: int, line: int) -> tuple[str, int] | None:
    """Returns what is wrong with what stands behind a list; None if nothing does."""
    end = _past_space(text, at)
    if end == len(text):
        return None
    return "not JSON: something stands behind the list", line + text.count("\n", at, end)


def _past_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _foreign(data: bytes) -> int | None:
    """Returns where a text stops being UTF-8; None if it does not."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start
    return None
