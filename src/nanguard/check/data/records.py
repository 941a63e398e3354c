"""Records read one by one, and JSON: lines, in blocks through polars, and files that are one list.

Reading one by one is slower than whole tables, and able to say what is wrong with each record.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nanguard.check.data.columns import (
    Column,
    ColumnNumbers,
    ColumnRoles,
    Label,
    LabelColumn,
    RowPlace,
    Shape,
    Tokens,
    label_of,
    roles_of,
)
from nanguard.check.data.dataset import Ledger
from nanguard.check.data.tables import (
    MIN_ZERO_WIDTH,
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
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from nanguard.check.data.dataset import WatchedValues
    from nanguard.check.scan import Scan

MAX_COLUMNS = 4096
_WIDER: dict[Shape, Shape] = {"int": "float", "ints": "floats"}
_LISTED: dict[Shape, Shape] = {"int": "ints", "float": "floats", "bool": "ints", "text": "texts"}
SAMPLE_LINES = 200
REFUSED_LINE_BYTES = 256 << 10  # a block of this size that polars refuses is read line by line
REFUSED_LINE_PARTS = 8
_ROW, _COUNT = "__row", "__count"


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
