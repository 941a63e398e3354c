"""Text logs, JSON lines included: lines are read once, and then recognised by their shape."""

from __future__ import annotations

import math
import re
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nanguard.check.log.gathering import Gathering, Pieces, Rows, Which, whole
from nanguard.check.log.grammar import INTERESTING, VALUE, Line, dataset_of, read_line
from nanguard.check.log.lines import SAME_LINE, Stretch, stretches
from nanguard.check.log.notes import SUSPECT, note_of
from nanguard.check.log.records import line_of, loads
from nanguard.check.log.shapes import LONGEST, Shape, shape_of
from nanguard.check.log.tables import Table, table_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from nanguard.check.log.series import Log, Note
    from nanguard.check.scanning import Scan

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
    """Reads stretches of text into rows."""

    def __init__(self, gathering: Gathering) -> None:
        self._gathering = gathering
        self.shapes: list[Shape] = []
        self._known: set[str] = set()
        self.table: Table | None = None
        self._strangers = 0

    def read(self, stretch: Stretch) -> None:
        """Reads a stretch line by line."""
        texts = stretch.text.split("\n")
        pieces = None
        if SAME_LINE in stretch.text:
            pieces = Pieces(stretch.first, _lines_of(texts, stretch.first))
            texts = [text.removeprefix(SAME_LINE) for text in texts]
        if not stretch.ended:
            texts[-1] = without_last_number(texts[-1])
        self.gather([], enumerate(texts, stretch.first), pieces)

    def gather(
        self,
        rows: list[Rows],
        numbered: Iterable[tuple[int, str]],
        pieces: Pieces | None = None,
    ) -> None:
        """Adds rows that are known already, and those of lines that are still to be read."""
        taken: dict[int, _Taken] = {}
        loose: dict[tuple[object, ...], Rows] = {}
        notes: list[Note] = []
        for number, text in numbered:
            if not text or self._taken(number, text, taken):
                continue
            if not (self.table or WORTH_READING.search(text)):
                continue
            self._read(number, text, loose, notes)
        rows += [rows_of(self.shapes[at], held) for at, held in taken.items()]
        rows += loose.values()
        self._gathering.add(rows, notes, pieces)

    def _taken(self, number: int, text: str, taken: dict[int, _Taken]) -> bool:
        if len(text) > LONGEST:
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
        self, number: int, text: str, loose: dict[tuple[object, ...], Rows], notes: list[Note]
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

    def _row(self, text: str) -> Line | None:
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

    def _learn(self, text: str, line: Line) -> bool:
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


def _alike(one: Line, other: Line) -> bool:
    def said(line: Line) -> tuple[object, ...]:
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


def add_loose(loose: dict[tuple[object, ...], Rows], number: int, line: Line) -> None:
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
        rows = loose[key] = Rows(
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


def rows_of(shape: Shape, held: _Taken) -> Rows:
    """Returns the rows of lines of one shape."""
    try:
        groups = [array("d", map(float, column)) for column in zip(*held.groups, strict=False)]
    except ValueError:
        kept = [(n, g) for n, g in zip(held.lines, held.groups, strict=False) if _all_numbers(g)]
        held = _Taken([n for n, _ in kept], [g for _, g in kept])
        groups = [array("d", map(float, column)) for column in zip(*held.groups, strict=False)]
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
) -> Rows:
    """Returns the rows that a shape's numbers make."""
    rows = Rows(lines, steps)
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
        from nanguard.check.log.bulk import bulk_reader

        bulk = bulk_reader(reader)
        if bulk is not None:
            bulk.read_all(stretches(path, scan.progress), scan.threads)
            return gathering.log
    for stretch in stretches(path, scan.progress):
        reader.read(stretch)
    return gathering.log
