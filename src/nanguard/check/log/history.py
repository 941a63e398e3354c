"""Histories in one JSON text: trainer_state.json, lists of records, columns of numbers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from nanguard.check.log.gathering import Gathering, Rows
from nanguard.check.log.names import METRICS, Role, metric_of
from nanguard.check.log.records import line_of, loads
from nanguard.check.log.series import Column
from nanguard.check.log.text import add_loose
from nanguard.errors import SourceError

if TYPE_CHECKING:
    from pathlib import Path

    from nanguard.check.log.series import Log
    from nanguard.check.scanning import Scan

_LARGEST = 256 << 20
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
    losses = [metric for metric in columns if metric and metric.role is Role.LOSS]
    return len(losses) > 0 and len([metric for metric in columns if metric]) > 1


def _losses(values: list[Any]) -> bool:
    return any(value.metric.role in (Role.LOSS, Role.GRAD_NORM, Role.SCALE) for value in values)


def read_history(path: Path, scan: Scan) -> Log:
    """Returns what a history says.

    Raises:
        OSError: It cannot be read.
        SourceError: It is cut short, or too large.
    """
    size = path.stat().st_size
    if size > _LARGEST:
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
            "this is no whole JSON text with a history.",
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
    placed = any(metric.role not in METRICS for metric in known.values())
    return [
        {
            **({} if placed else {"epoch": row + 1}),
            **{name: columns[name][row] for name in known if row < len(columns[name])},
        }
        for row in range(rows)
    ]


def _gathered(path: str, text: str, records: list[dict[str, Any]]) -> Log:
    lines = _lines(text, len(records))
    gathering = Gathering(path)
    loose: dict[tuple[object, ...], Rows] = {}
    for number, record in enumerate(records):
        add_loose(loose, lines[number] if lines else number + 1, line_of(record))
    gathering.add(list(loose.values()))
    if not lines:
        for series in gathering.log.series:
            series.lines = Column()
    return gathering.log


def _lines(text: str, wanted: int) -> list[int]:
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
