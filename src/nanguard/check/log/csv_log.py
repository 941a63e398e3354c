"""CSV logs: training histories, and the metrics.csv of Lightning with its empty cells."""

from __future__ import annotations

import csv
import os
import re
from functools import partial
from typing import IO, TYPE_CHECKING

from nanguard.check.log.gathering import Gathering, Rows
from nanguard.check.log.grammar import LONGEST, VALUE, Line, Value, number_of
from nanguard.check.log.names import METRICS, Metric, Role, metric_of
from nanguard.check.log.text import add_loose

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from nanguard.check.log.series import Log
    from nanguard.check.scanning import Scan

_ROWS = 20_000
_TOLD = 1 << 20
_NO_NAME = re.compile(r"[:={}]")
_MOST_COLUMNS = 2000


def columns_of(header: str) -> tuple[str, list[Metric | None]] | None:
    """Returns the separator and the columns of a header; None if it is none of a log."""
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
        placed = roles & {Role.STEP, Role.EPOCH, Role.BATCH}
        if roles & {Role.LOSS, Role.GRAD_NORM, Role.SCALE} and (placed or len(roles) > 1):
            return separator, columns
    return None


def read_csv(path: Path, scan: Scan) -> Log:
    """Returns what a CSV log says.

    Raises:
        OSError: It cannot be read.
    """
    gathering = Gathering(str(path))
    gathering.log.sparse = True
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        left = os.fstat(file.fileno()).st_size
        header = file.readline(LONGEST)
        found = columns_of(header)
        if found is None:
            return gathering.log
        separator, columns = found
        lines = _lines(file, left - len(header), partial(scan.progress, str(path)))
        loose: dict[tuple[object, ...], Rows] = {}
        reader = csv.reader(lines, delimiter=separator)
        for count, (number, cells) in enumerate(_rows(reader), 1):
            add_loose(loose, number + 1, row_of(columns, cells))
            if count % _ROWS == 0:
                gathering.add(list(loose.values()))
                loose = {}
        gathering.add(list(loose.values()))
    return gathering.log


def _lines(file: IO[str], left: int, progress: Callable[[int], None]) -> Iterator[str]:
    """Yields lines, the endless ones cut short, as far as the file reached when it was opened."""
    seen = 0
    while left > 0 and (line := file.readline(LONGEST)):
        left -= len(line)
        seen += len(line)
        if seen > _TOLD:
            progress(seen)
            seen = 0
        if line.endswith("\n") or len(line) < LONGEST:
            yield line.replace("\0", "")
            continue
        yield line[:1000] + "\n"
        while (more := file.readline(LONGEST)) and not more.endswith("\n"):
            left -= len(more)
    progress(seen)


def _rows(reader: Iterator[list[str]]) -> Iterator[tuple[int, list[str]]]:
    number = 0
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error:
            continue
        finally:
            number = reader.line_num  # type: ignore[attr-defined]
        yield number, cells


def row_of(columns: list[Metric | None], cells: list[str]) -> Line:
    """Returns what a row says."""
    line = Line()
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
        _put(line, Value(metric, number, 0, 0))
    return line


def _put(line: Line, value: Value) -> None:
    role = value.metric.role
    if role in METRICS:
        line.values.append(value)
    elif value.number - value.number != 0:
        return
    elif role is Role.STEP or (role is Role.BATCH and line.step is None):
        line.step = value
    elif role is Role.EPOCH:
        line.epoch = value
    elif role is Role.RANK:
        line.rank = int(value.number)
