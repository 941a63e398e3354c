"""CSV logs, and histories in one JSON text."""

from __future__ import annotations

import csv
import os
import re
from functools import partial
from itertools import chain
from typing import IO, TYPE_CHECKING, Any

from nanguard.check.log.grammar import (
    DECODING,
    HAS_ZEROS,
    LONGEST_LINE,
    NOT_IN_UTF8,
    NOT_UTF8,
    VALUE,
    ZEROS,
    LoggedValue,
    LogLine,
    line_of,
    loads,
    marked,
    number_of,
    unmarked,
)
from nanguard.check.log.quantities import METRIC_ROLES, Metric, Quantity, metric_of
from nanguard.check.log.series import BadLine, Gathering, LogRows, SeriesColumn
from nanguard.check.log.text_log import add_loose
from nanguard.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from nanguard.check.log.series import Log
    from nanguard.check.scan import Scan

_ROWS_AT_ONCE = 20_000
# Bytes between two reports of progress.
_PROGRESS_BYTES = 1 << 20
_NO_NAME = re.compile(r"[:={}]")
_MOST_COLUMNS = 2000


def columns_of(header: str) -> tuple[str, list[Metric | None]] | None:
    """Returns the separator and the columns of a header; None if it is none of a log."""
    header = marked(header).replace(ZEROS, "").replace(NOT_UTF8, "")
    for separator in ",\t;":
        try:
            names = next(csv.reader([header], delimiter=separator), [])
        except csv.Error:
            continue
        if not 2 <= len(names) <= _MOST_COLUMNS:
            continue
        if any(_NO_NAME.search(name) or VALUE.fullmatch(name.strip()) for name in names):
            continue
        columns = [metric_of(name) for name in names]
        roles = {metric.role for metric in columns if metric}
        placed = roles & {Quantity.STEP, Quantity.EPOCH, Quantity.BATCH}
        if roles & {Quantity.LOSS, Quantity.GRAD_NORM, Quantity.SCALE} and (
            placed or len(roles) > 1
        ):
            return separator, columns
    return None


def read_csv(path: Path, scan: Scan) -> Log:
    """Returns what a CSV log says.

    Raises:
        OSError: It cannot be read.
    """
    gathering = Gathering(str(path))
    gathering.log.sparse = True
    with path.open(encoding="utf-8-sig", errors=DECODING, newline="") as file:
        left = os.fstat(file.fileno()).st_size
        header = file.readline(LONGEST_LINE)
        found = columns_of(header)
        if found is None:
            return gathering.log
        lines = _csv_lines(file, left - len(header), partial(scan.progress, str(path)))
        gather_rows(gathering, chain([header], lines), 1, *found)
    return gathering.log


def gather_rows(
    gathering: Gathering,
    lines: Iterable[str],
    first: int,
    separator: str,
    columns: list[Metric | None],
) -> None:
    """Adds the rows of a table to a log.

    Args:
        gathering: What makes the log.
        lines: The lines, each with its end, marks of damage included.
        first: The number of the first one.
        separator: What stands between two cells.
        columns: What each column is.
    """
    cleaned = _Cleaned(lines, first)
    loose: dict[tuple[object, ...], LogRows] = {}
    bad: list[BadLine] = []
    reader = csv.reader(cleaned, delimiter=separator)
    for count, (cells, damage) in enumerate(_rows(reader), 1):
        number = first + reader.line_num - 1
        add_loose(loose, number, row_of(columns, cells))
        # A last line without an end may still be being written.
        if not damage and cells and len(cells) != len(columns) and cleaned.ended:
            damage = f"the row has not {len(columns)} cells, as the header has"
        if damage:
            bad.append(BadLine(number, damage))
        if count % _ROWS_AT_ONCE == 0:
            gathering.add(list(loose.values()), bad=bad)
            loose, bad = {}, []
    gathering.add(list(loose.values()), bad=[*bad, *cleaned.bad])


class _Cleaned:
    """Lines without the marks of damage.

    Attributes:
        bad: The lines that had marks.
        ended: Whether the last line has an end.
    """

    def __init__(self, lines: Iterable[str], first: int) -> None:
        self._lines = enumerate(lines, first)
        self.bad: list[BadLine] = []
        self.ended = True

    def __iter__(self) -> Iterator[str]:
        for number, line in self._lines:
            self.ended = line.endswith("\n")
            text = marked(line)
            if ZEROS in text or NOT_UTF8 in text:
                self.bad.append(BadLine(number, HAS_ZEROS if ZEROS in text else NOT_IN_UTF8))
                text = unmarked(text)
            yield text


def _csv_lines(file: IO[str], left: int, progress: Callable[[int], None]) -> Iterator[str]:
    """Yields lines, the endless ones cut short, as far as the file reached when it was opened."""
    seen = 0
    while left > 0 and (line := file.readline(LONGEST_LINE)):
        left -= len(line)
        seen += len(line)
        if seen > _PROGRESS_BYTES:
            progress(seen)
            seen = 0
        if line.endswith("\n") or len(line) < LONGEST_LINE:
            yield line
            continue
        yield line[:1000] + "\n"
        while (more := file.readline(LONGEST_LINE)) and not more.endswith("\n"):
            left -= len(more)
    progress(seen)


def _rows(reader: Iterator[list[str]]) -> Iterator[tuple[list[str], str]]:
    """Yields rows, and what is wrong with them."""
    while True:
        try:
            yield next(reader), ""
        except StopIteration:
            return
        except csv.Error as error:
            yield [], f"the row is not CSV ({error})"


def row_of(columns: list[Metric | None], cells: list[str]) -> LogLine:
    """Returns what a row says."""
    line = LogLine()
    # A header that stands in the middle of the file, after a restart, holds no numbers.
    for metric, cell in zip(columns, cells, strict=False):
        text = cell.strip() if metric else ""
        if metric is None or not text or len(text) > 40:
            continue
        percent = text.endswith("%")
        text = text.removesuffix("%").strip()
        if not VALUE.fullmatch(text):
            continue
        number = number_of(text) / (100 if percent else 1)
        _put(line, LoggedValue(metric, number, 0, 0))
    return line


def _put(line: LogLine, value: LoggedValue) -> None:
    role = value.metric.role
    if role in METRIC_ROLES:
        line.values.append(value)
    elif value.number - value.number != 0:
        return
    elif role is Quantity.STEP or (role is Quantity.BATCH and line.step is None):
        line.step = value
    elif role is Quantity.EPOCH:
        line.epoch = value
    elif role is Quantity.RANK:
        line.rank = int(value.number)


_HISTORY_BYTES = 256 << 20
_FIRST = re.compile(r"\s*\[\s*(\{[^{}\[\]]*\})")
_COLUMN = re.compile(r'"([^"]{1,60})"\s*:\s*\[\s*(?:[-+]?[\d.]|NaN|-?Infinity|null)')


def is_history(head: str) -> bool:
    """Returns whether a JSON text is a history, by its beginning."""
    if re.search(r'"log_history"\s*:\s*\[', head):
        return True
    first = _FIRST.match(head)
    if first:
        record = loads(first[1])
        line = line_of(record) if isinstance(record, dict) else None
        return bool(line and _losses(line.values) and (line.step or line.epoch))
    columns = [metric_of(name) for name in _COLUMN.findall(head)]
    losses = [metric for metric in columns if metric and metric.role is Quantity.LOSS]
    return len(losses) > 0 and len([metric for metric in columns if metric]) > 1


def _losses(values: list[Any]) -> bool:
    return any(
        value.metric.role in (Quantity.LOSS, Quantity.GRAD_NORM, Quantity.SCALE) for value in values
    )


def read_history(path: Path, scan: Scan) -> Log:
    """Returns what a history says.

    Raises:
        OSError: It cannot be read.
        SourceError: It is cut short, or too large.
    """
    size = path.stat().st_size
    if size > _HISTORY_BYTES:
        raise SourceError(
            f"a history of {size / 2**20:.0f} MiB in one JSON text is not read.",
            where=str(path),
            do="Check the log that the run printed instead.",
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise SourceError(
            f"the history is not text in UTF-8 (byte {error.start + 1}).",
            where=str(path),
            do="It was damaged: take the file of another checkpoint.",
        ) from error
    scan.progress(str(path), size)
    records = _records(loads(text))
    if records is None:
        raise SourceError(
            "this is not a complete JSON text with a history.",
            where=str(path),
            do="It may be cut short: take the file of another checkpoint.",
        )
    return _gathered(str(path), text, records)


def _records(content: Any) -> list[dict[str, Any]] | None:
    if isinstance(content, dict) and "log_history" in content:
        content = content["log_history"]
    if isinstance(content, list):
        return [record for record in content if isinstance(record, dict)]
    if not isinstance(content, dict):
        return None
    columns = {name: column for name, column in content.items() if isinstance(column, list)}
    known = {name: metric for name in columns if (metric := metric_of(name))}
    rows = max((len(columns[name]) for name in known), default=0)
    placed = any(metric.role not in METRIC_ROLES for metric in known.values())
    return [
        {
            **({} if placed else {"epoch": row + 1}),
            **{name: columns[name][row] for name in known if row < len(columns[name])},
        }
        for row in range(rows)
    ]


def _gathered(path: str, text: str, records: list[dict[str, Any]]) -> Log:
    lines = _lines_of_records(text, len(records))
    gathering = Gathering(path)
    loose: dict[tuple[object, ...], LogRows] = {}
    for number, record in enumerate(records):
        add_loose(loose, lines[number] if lines else number + 1, line_of(record))
    gathering.add(list(loose.values()))
    if not lines:
        for series in gathering.log.series:
            series.lines = SeriesColumn()
    return gathering.log


def _lines_of_records(text: str, wanted: int) -> list[int]:
    """Returns the line on which each record has its place; none if they cannot be told apart."""
    begin = max(text.find('"log_history"'), 0)
    for name in ("step", "epoch", "iter", "iteration", "global_step"):
        found: list[int] = []
        line, at = 1, 0
        for match in re.finditer(rf'"{name}"\s*:\s*\d', text[begin:]):
            line += text.count("\n", at, begin + match.start())
            at = begin + match.start()
            found.append(line)
        if len(found) == wanted and len(set(found)) == len(found):
            return found
    return []
