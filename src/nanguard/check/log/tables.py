"""Tables in text: a line of names, and lines of numbers below it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nanguard.check.log.grammar import VALUE, Line, Value, number_of
from nanguard.check.log.names import METRICS, Metric, Role, metric_of

_LONGEST = 1000
_RULED = re.compile(r"[|│┃]")
_SPACED = re.compile(r"\s{2,}|\t")
_NUMBERISH = re.compile(r"(?i)^(?:[-+]?[\d.,:/%eE+-]+[%a-zA-Z]{0,3}|nan|inf|-inf|none|n/a|-|)$")
_PROGRESS = re.compile(r"(?::|(?<!\s))\s+\d+%[|━].*$")
_RULE = re.compile(r"^[\s|+│┃─━┼╇╈═╪:=-]*$")


@dataclass(slots=True)
class Table:
    """The columns of a table whose head was seen."""

    columns: list[Metric | None]
    ruled: bool

    def row(self, text: str) -> Line | None:
        """Returns what a row says; None if the line is no row of this table."""
        if len(text) > _LONGEST:
            return None
        cells = _cells(_PROGRESS.sub("", text), ruled=self.ruled)
        if len(cells) != len(self.columns) or not all(_NUMBERISH.match(c.strip()) for c in cells):
            return None
        line = Line()
        for metric, cell in zip(self.columns, cells, strict=False):
            found = VALUE.match(cell.strip()) if metric else None
            if metric is None or found is None:
                continue
            value = Value(metric, number_of(found[0]), 0, 0)
            if metric.role in METRICS:
                line.values.append(value)
            elif metric.role is Role.EPOCH:
                line.epoch = value
            elif metric.role in (Role.STEP, Role.BATCH) and line.step is None:
                line.step = value
        return line

    def goes_on(self, text: str) -> bool:
        """Returns whether a line that is no row may stand inside the table."""
        return len(text) <= _LONGEST and (bool(_RULE.match(text)) or "%|" in text)


def table_of(text: str) -> Table | None:
    """Returns the table a line is the head of; None if it is no head."""
    if len(text) > _LONGEST or VALUE.search(text):
        return None
    ruled = bool(_RULED.search(text))
    cells = _cells(text, ruled=ruled)
    if len(cells) < 2 or any(len(cell) > 40 for cell in cells):
        return None
    columns = [metric_of(cell) if cell else None for cell in cells]
    roles = [metric.role for metric in columns if metric]
    wanted = [role for role in roles if role in METRICS]
    placed = Role.STEP in roles or Role.EPOCH in roles or len(wanted) > 1
    return Table(columns, ruled) if wanted and placed else None


def _cells(text: str, *, ruled: bool) -> list[str]:
    if ruled:
        return [cell.strip() for cell in _RULED.split(text.strip().strip("|│┃"))]
    text = text.strip()
    cells = _SPACED.split(text)
    return cells if len(cells) > 1 else text.split()
