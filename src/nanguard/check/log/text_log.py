"""Text logs, JSON lines included: cut into stretches, read once, then recognised by their shape."""

from __future__ import annotations

import codecs
import math
import os
import re
from array import array
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nanguard.check.log.grammar import (
    DECODING,
    INTERESTING,
    LONGEST_LINE,
    LONGEST_SHAPED,
    NOT_JSON,
    NOT_UTF8,
    VALUE,
    ZEROS,
    LogLine,
    Shape,
    TextTable,
    damage_of,
    dataset_of,
    line_of,
    loads,
    marked,
    read_line,
    shape_of,
    table_of,
    unmarked,
)
from nanguard.check.log.quantities import SUSPECT, note_of
from nanguard.check.log.series import BadLine, Gathering, LogRows, Pieces, Which, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from nanguard.check.log.series import Log, Note
    from nanguard.check.scan import Scan

_BLOCK_BYTES = 2 << 20
# Begins a piece of a line that a carriage return has cut: it counts to the line before it.
SAME_LINE = "\0"
_COLOURS = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")


@dataclass(frozen=True, slots=True)
class Stretch:
    """Some lines of a log.

    Attributes:
        first: The number of the first line, counted from 1.
        text: The lines, without the last line's end.
        ended: Whether the last line was seen to end; it may still be being written.
    """

    first: int
    text: str
    ended: bool = True


class Cutter:
    """Cuts decoded text into stretches.

    Args:
        eager: Whether a piece that a carriage return has ended is handed on at once, for progress
            bars that somebody watches; else only when there is too much of it.
    """

    def __init__(self, *, eager: bool = False) -> None:
        self._eager = eager
        self._left = ""
        self._line = 1
        self._inside = False
        self._dropping = False

    def cut(self, text: str) -> Iterator[Stretch]:
        """Yields the whole lines of what was read so far."""
        if self._dropping:
            end = text.find("\n")
            if end < 0:
                return
            text, self._dropping = text[end:], False
        text = self._left + text
        end = text.rfind("\n")
        endless = end < 0 and len(text) > _BLOCK_BYTES
        # The last one may be half of a line's end.
        turn = text.rfind("\r", end + 1, -1) if endless or self._eager else -1
        if turn >= 0:
            yield self._stretch(text[:turn], inside_after=True)
        elif endless:
            self._dropping, self._left = True, ""
            yield self._stretch(text[:LONGEST_LINE], inside_after=True)
            return
        elif end >= 0:
            yield self._stretch(text[:end], inside_after=False)
        self._left = text[max(end, turn) + 1 :]

    @property
    def waiting(self) -> bool:
        """Whether there is a line that has no end yet."""
        return bool(self._left)

    def rest(self) -> Iterator[Stretch]:
        """Yields the line that had no end."""
        left, self._left = self._left, ""
        if left:
            yield self._stretch(left, inside_after=True, ended=False)

    def _stretch(self, text: str, *, inside_after: bool, ended: bool = True) -> Stretch:
        first, began_inside = self._line, self._inside
        self._line += text.count("\n") + (not inside_after)
        self._inside = inside_after
        text = marked(text)
        if "\x1b" in text:
            text = without_colours(text)
        if "\r" in text:
            text = text.replace("\r\n", "\n").removesuffix("\r").replace("\r", "\n" + SAME_LINE)
        return Stretch(first, SAME_LINE + text if began_inside else text, ended)


def without_colours(text: str) -> str:
    """Returns a text without the sequences that colour it on a terminal."""
    return _COLOURS.sub("", text)


def stretches(path: Path, progress: Callable[[str, int], None]) -> Iterator[Stretch]:
    """Yields a file's lines, as far as it reaches when it is opened.

    Raises:
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        # What is written while it is read belongs to the next look.
        left = os.fstat(file.fileno()).st_size
        cutter, decoder = Cutter(), None
        while left > 0:
            block = file.read(min(_BLOCK_BYTES, left))
            if not block:
                break
            left -= len(block)
            progress(str(path), len(block))
            decoder = decoder or decoder_of(block)
            yield from cutter.cut(decoder.decode(block))
        yield from cutter.rest()


def stretches_of(text: str) -> Iterator[Stretch]:
    """Yields the lines of a text."""
    cutter = Cutter()
    yield from cutter.cut(text)
    yield from cutter.rest()


def decoder_of(head: bytes) -> codecs.IncrementalDecoder:
    """Returns what decodes a log that begins so."""
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "utf-16"
    else:
        encoding = "utf-8-sig" if head.startswith(codecs.BOM_UTF8) else "utf-8"
    return codecs.getincrementaldecoder(encoding)(DECODING)


# Smaller files are done before the engine for large ones is loaded.
_BULK = 4 << 20
_MOST_SHAPES = 128
# How many of the last shapes a line is compared with before it is read.
_RECENT = 6
# Lines that are no rows after which a table has ended.
_TABLE_ENDS = 4
WORTH_READING = re.compile(
    f"{INTERESTING.pattern}|{SUSPECT.pattern}|epoch|step|iter|update", re.IGNORECASE
)


@dataclass(slots=True)
class _Taken:
    """What lines of one shape held."""

    lines: list[int] = field(default_factory=list)
    groups: list[tuple[str, ...]] = field(default_factory=list)


class TextReader:
    """Reads stretches of text into rows.

    Attributes:
        shapes: The shapes of lines that were learned.
        table: The table whose rows are being read, if one is.
        only_records: Whether every line has to be JSON, by the name of the file.
    """

    def __init__(self, gathering: Gathering) -> None:
        self._gathering = gathering
        self.shapes: list[Shape] = []
        self._known: set[str] = set()
        self.table: TextTable | None = None
        self._strangers = 0
        self._records = False
        self.only_records = gathering.log.path.lower().endswith((".jsonl", ".ndjson"))

    def read(self, stretch: Stretch) -> None:
        """Reads a stretch line by line."""
        texts = stretch.text.split("\n")
        pieces = None
        if SAME_LINE in stretch.text:
            pieces = Pieces(stretch.first, _lines_of(texts, stretch.first))
            texts = [text.removeprefix(SAME_LINE) for text in texts]
        cut = None
        if not stretch.ended:
            texts[-1] = without_last_number(texts[-1])
            cut = stretch.first + len(texts) - 1
        self.gather([], enumerate(texts, stretch.first), pieces, cut)

    def gather(
        self,
        rows: list[LogRows],
        numbered: Iterable[tuple[int, str]],
        pieces: Pieces | None = None,
        cut: int | None = None,
    ) -> None:
        """Adds rows that are known already, and those of lines that are still to be read.

        Args:
            rows: The rows.
            numbered: Lines with their numbers.
            pieces: Where carriage returns cut lines into pieces, the line of each.
            cut: The line that may still be being written, which is not whole and not bad.
        """
        taken: dict[int, _Taken] = {}
        loose: dict[tuple[object, ...], LogRows] = {}
        notes: list[Note] = []
        bad: list[BadLine] = []
        for number, text in numbered:
            if not text or self._taken(number, text, taken):
                continue
            damage = "" if number == cut else self._damage(text)
            if damage:
                bad.append(BadLine(number, damage))
            text = unmarked(text)
            if not (self.table or WORTH_READING.search(text)):
                continue
            self._read(number, text, loose, notes)
        for at, held in taken.items():
            found = rows_of(self.shapes[at], held)
            rows.append(found)
            if self._records and self.only_records:
                lost = set(held.lines) - set(found.lines or ()) - {cut}
                bad += [BadLine(number, NOT_JSON) for number in sorted(lost)]
        rows += loose.values()
        self._gathering.add(rows, notes, pieces, bad)

    def _damage(self, text: str) -> str:
        if not self._records and text.startswith("{"):
            self._records = isinstance(loads(text), dict)
        return damage_of(
            text, records=self._records, only_records=self._records and self.only_records
        )

    def _taken(self, number: int, text: str, taken: dict[int, _Taken]) -> bool:
        if len(text) > LONGEST_SHAPED:
            return False
        last = len(self.shapes) - 1
        for at in range(last, max(-1, last - _RECENT), -1):
            found = self.shapes[at].compiled.match(text)
            if found:
                held = taken.get(at)
                if held is None:
                    held = taken[at] = _Taken()
                held.lines.append(number)
                held.groups.append(found.groups())
                return True
        return False

    def _read(
        self, number: int, text: str, loose: dict[tuple[object, ...], LogRows], notes: list[Note]
    ) -> None:
        line = self._row(text)
        if line is None:
            structured = line_of(record) if isinstance(record := _record(text), dict) else None
            line = read_line(text)
            if structured is not None:
                structured.label = dataset_of(text)
            if structured is not None and not _alike(structured, line):
                line = structured
            elif self._learn(text, line):
                pass
        note = note_of(text, number)
        if note is not None and not any(not math.isfinite(v.number) for v in line.values):
            notes.append(note)
        add_loose(loose, number, line)

    def _row(self, text: str) -> LogLine | None:
        """Returns the line as a row of the table it stands in; None if it is none."""
        if self.table is not None:
            row = self.table.row(text)
            if row is not None and row.values:
                self._strangers = 0
                return row
            if not self.table.goes_on(text):
                self._strangers += 1
            if self._strangers > _TABLE_ENDS:
                self.table = None
        if INTERESTING.search(text):
            head = table_of(text)
            if head is not None:
                self.table, self._strangers = head, 0
        return None

    def _learn(self, text: str, line: LogLine) -> bool:
        if len(self.shapes) >= _MOST_SHAPES or SUSPECT.search(_plain(text)):
            return False
        shape = shape_of(text, line)
        if shape is None or shape.pattern in self._known:
            return False
        self._known.add(shape.pattern)
        self.shapes.append(shape)
        return True


def _lines_of(texts: list[str], first: int) -> array[int]:
    """Returns the line of each piece; a carriage return ends a piece, not a line."""
    lines, number = array("q"), first - (not texts[0].startswith(SAME_LINE))
    for text in texts:
        number += not text.startswith(SAME_LINE)
        lines.append(number)
    return lines


def _plain(text: str) -> str:
    """Returns a line without its values, of which NaN is one, and without its level."""
    return VALUE.sub("", text).replace("INFO", "")


def _record(text: str) -> object:
    stripped = text.strip()
    return loads(stripped) if stripped.startswith("{") and stripped.endswith("}") else None


def _alike(one: LogLine, other: LogLine) -> bool:
    def said(line: LogLine) -> tuple[object, ...]:
        values = [(v.metric.key, repr(v.number)) for v in line.values]
        places = [p.number if p else None for p in (line.step, line.epoch)]
        return sorted(values), places, line.rank, line.label

    return said(one) == said(other)


def without_last_number(text: str) -> str:
    """Returns a line that is still being written without the number it may break off in."""
    for match in VALUE.finditer(text[-40:]):
        if match.end() == min(len(text), 40) and match[0][-1].isdigit() | match[0].endswith("."):
            return text[: len(text) - len(match[0])]
    return text


def add_loose(loose: dict[tuple[object, ...], LogRows], number: int, line: LogLine) -> None:
    """Adds one line to the rows with the same columns."""
    columns: dict[Which, float] = {}
    for value in line.values:
        columns.setdefault(Which(value.metric, line.label, line.rank), value.number)
    step = None if line.step is None else whole(line.step.number)
    if not columns and step is None and line.epoch is None:
        return
    key = (*columns, step is None, line.epoch is None)
    rows = loose.get(key)
    if rows is None:
        rows = loose[key] = LogRows(
            array("q"),
            None if step is None else array("q"),
            None if line.epoch is None else array("d"),
            {which: array("d") for which in columns},
        )
    rows.lines.append(number)  # type: ignore[union-attr]
    if step is not None:
        rows.steps.append(step)  # type: ignore[union-attr]
    if line.epoch is not None:
        rows.epochs.append(line.epoch.number)  # type: ignore[union-attr]
    for which, number_ in columns.items():
        rows.columns[which].append(number_)  # type: ignore[attr-defined]


def rows_of(shape: Shape, held: _Taken) -> LogRows:
    """Returns the rows of lines of one shape."""
    try:
        groups = [array("d", map(float, column)) for column in zip(*held.groups, strict=False)]
    except ValueError:
        kept = [(n, g) for n, g in zip(held.lines, held.groups, strict=False) if _all_numbers(g)]
        held = _Taken([n for n, _ in kept], [g for _, g in kept])
        groups = [array("d", map(float, column)) for column in zip(*held.groups, strict=False)]
        if not kept:
            return LogRows(array("q"))
    return shaped(shape, array("q", held.lines), groups)


def _all_numbers(group: tuple[str, ...]) -> bool:
    try:
        return all(abs(float(text)) < 1e300 for text in group)
    except ValueError:
        return False


def shaped(
    shape: Shape,
    lines: Sequence[int],
    groups: list[array[float]],
    steps: Sequence[int] | None = None,
) -> LogRows:
    """Returns the rows that a shape's numbers make."""
    rows = LogRows(lines, steps)
    if steps is None and shape.step is not None:
        rows.steps = array("q", [whole(v) or 0 for v in groups[shape.step]])
    if shape.epoch is not None:
        rows.epochs = groups[shape.epoch]
    for which, at in shape.columns.items():
        column = groups[at]
        rows.columns[which] = (
            array("d", [v / 100 for v in column]) if which in shape.percent else column
        )
    for which, constant in shape.fixed.items():
        rows.columns[which] = array("d", [constant]) * len(lines)
    return rows


def read_text(path: Path, scan: Scan) -> Log:
    """Returns what a text log says.

    Raises:
        OSError: It cannot be read.
    """
    gathering = Gathering(str(path))
    reader = TextReader(gathering)
    if path.stat().st_size >= _BULK:
        bulk = bulk_reader(reader)
        if bulk is not None:
            bulk.read_all(stretches(path, scan.progress), scan.threads)
            return gathering.log
    for stretch in stretches(path, scan.progress):
        reader.read(stretch)
    return gathering.log


# How many shapes are tried on all lines, and the share of lines that earns a shape its place.
_SHAPES_TRIED = 8
_SHARE_OF_LINES = 0.002
# How much of a log is read line by line before all of it is.
_LEARN = 1 << 14
_MOST_STEP = 2**62
_WORTH = f"(?i){WORTH_READING.pattern}|[{{}}{ZEROS}{NOT_UTF8}]"


def bulk_reader(reader: TextReader) -> Bulk | None:
    """Returns a reader that works with polars; None where it is not installed."""
    try:
        import numpy as np
        import polars as pl
    except ImportError:
        return None
    return Bulk(reader, pl, np)


class Bulk:
    """Reads what has a known shape in bulk, and leaves the rest to the reader of lines."""

    def __init__(self, reader: TextReader, pl: Any, np: Any) -> None:
        self._reader = reader
        self._pl = pl
        self._np = np
        self._hits: dict[str, int] = {}

    def read_all(self, stretches: Iterable[Stretch], threads: int) -> None:
        """Reads stretches in order, the next ones beside the one that is gathered."""
        waiting: deque[Any] = deque()
        with ThreadPoolExecutor(max_workers=max(1, threads)) as pool:
            for stretch in stretches:
                if not self._reader.shapes:
                    stretch = self._first_lines(stretch)
                waiting.append((stretch, pool.submit(self._take_all, stretch, self._chosen())))
                if len(waiting) > threads:
                    self._gather(*waiting.popleft())
            while waiting:
                self._gather(*waiting.popleft())

    def _gather(self, stretch: Stretch, work: Any) -> None:
        try:
            taken = work.result()
        except self._pl.exceptions.PanicException:  # which is no Exception, and would end a server
            taken = None
        if taken is None:
            self._reader.read(stretch)
            return
        rows, left, pieces = taken
        if self._reader.table is None and not self._reader.only_records:
            left = left.filter(self._pl.col("l").str.contains(_WORTH))
        numbered = zip(left["n"].to_list(), left["l"].to_list(), strict=True)
        self._reader.gather(rows, numbered, pieces)

    def _chosen(self) -> list[Shape]:
        """Returns the shapes that are tried on all lines, the most frequent first."""
        shapes = [shape for shape in self._reader.shapes if shape.compiled.groups]
        shapes.sort(key=lambda shape: -self._hits.get(shape.pattern, 1 << 30))
        return shapes[:_SHAPES_TRIED]

    def _first_lines(self, stretch: Stretch) -> Stretch:
        """Reads some lines one by one, to learn shapes from; returns the rest."""
        end = stretch.text.find("\n", _LEARN)
        while end >= 0 and stretch.text.startswith(SAME_LINE, end + 1):
            end = stretch.text.find("\n", end + 1)
        if end < 0:
            return stretch
        head = stretch.text[:end]
        self._reader.read(Stretch(stretch.first, head))
        first = stretch.first + head.count("\n") + 1 - head.count("\n" + SAME_LINE)
        return Stretch(first, stretch.text[end + 1 :], stretch.ended)

    def _take_all(
        self, stretch: Stretch, shapes: list[Shape]
    ) -> tuple[list[LogRows], Any, Pieces | None] | None:
        """Returns the rows of known shapes and the lines that are left; None if none is known."""
        if not shapes or not stretch.ended:
            return None
        frame, pieces = self._frame(stretch)
        rows: list[LogRows] = []
        total = len(frame)
        for shape in shapes:
            if self._hits.get(shape.pattern, total) < _SHARE_OF_LINES * total or not len(frame):
                continue
            frame, found = self._take(frame, shape)
            if found is not None:
                rows.append(found)
        return rows, frame, pieces

    def _frame(self, stretch: Stretch) -> tuple[Any, Pieces | None]:
        """Returns the numbered lines, and which pieces make a line where some are cut."""
        pl = self._pl
        frame = pl.Series("l", [stretch.text]).str.split("\n").explode().to_frame()
        frame = frame.with_row_index("n", offset=stretch.first)
        if SAME_LINE not in stretch.text:
            return frame, None
        starts = ~frame["l"].str.starts_with(SAME_LINE)
        before = stretch.first - int(starts[0])
        numbers = array("q", (starts.cast(pl.Int64).cum_sum() + before).to_numpy().tobytes())
        frame = frame.with_columns(pl.col("l").str.strip_prefix(SAME_LINE))
        return frame, Pieces(stretch.first, numbers)

    def _take(self, frame: Any, shape: Shape) -> tuple[Any, LogRows | None]:
        """Returns the lines that are left, and the rows of those that had the shape."""
        pl = self._pl
        try:
            groups = frame["l"].str.extract_groups(shape.pattern).struct.unnest()
        except pl.exceptions.PolarsError:  # a pattern too large for its engine
            self._hits[shape.pattern] = 0
            return frame, None
        numbers = groups.select(pl.all().cast(pl.Float64, strict=False))
        finite = pl.all_horizontal(pl.all().is_finite().fill_null(value=False))
        whole = numbers.select(ok=finite)["ok"]
        hits = int(whole.sum())
        self._hits[shape.pattern] = hits
        if not hits:
            return frame, None
        if hits == len(whole):
            return frame.clear(), self._rows(shape, frame["n"], numbers)
        left = frame.filter(~whole)
        return left, self._rows(shape, frame["n"].filter(whole), numbers.filter(whole))

    def _rows(self, shape: Shape, lines: Any, numbers: Any) -> LogRows:
        np = self._np
        taken = [np.ascontiguousarray(column.to_numpy()) for column in numbers]
        steps = None
        if shape.step is not None:
            steps = self._whole(np.clip(taken[shape.step], -_MOST_STEP, _MOST_STEP))
        columns = [self._column(column) for column in taken]
        return shaped(shape, self._whole(lines.to_numpy()), columns, steps)

    def _column(self, values: Any) -> array[float]:
        """Returns finite numbers in single precision, where that holds them."""
        np = self._np
        with np.errstate(over="ignore"):
            narrow = values.astype(np.float32)
        if np.isfinite(narrow).all():
            return array("f", narrow.tobytes())
        return array("d", values.tobytes())

    def _whole(self, values: Any) -> Sequence[int]:
        """Returns whole numbers, as a range where they are regular."""
        np = self._np
        whole = values.astype(np.int64)
        stride = int(whole[1] - whole[0]) if len(whole) > 1 else 1
        if stride and (np.diff(whole) == stride).all():
            return range(int(whole[0]), int(whole[-1]) + (1 if stride > 0 else -1), stride)
        return array("q", whole.tobytes())
