"""The numbers behind a cause, as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from nanguard.view.report.fields import listed, literal, number, numbers, text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import RenderableType

_ROWS = 8
_COLUMNS = ("shape", "dtype", "min", "max", "zeros", "nonfinite", "nan", "inf", "-inf")
# They say what ``nonfinite`` is made of, and are in the way where there is nothing of the kind.
_KINDS = ("nan", "inf", "-inf")


def evidence(found: Sequence[Mapping[str, Any]]) -> list[RenderableType]:
    """Returns the numbers: what a tensor holds in a table, anything else below it."""
    shown = [entry for entry in found if text(entry, "what")][:_ROWS]
    columns = [name for name in _COLUMNS if any(_counts(entry, name) for entry in shown)]
    body: list[RenderableType] = []
    rows = [entry for entry in shown if any(_value(entry, name) for name in columns)]
    if rows:
        body += [Text(), _table(rows, columns)]
    lines = [line for entry in shown if (line := _line(entry))]
    return [*body, Text(), *lines] if lines else body


def _counts(entry: Mapping[str, Any], name: str) -> bool:
    value = _value(entry, name)
    return bool(value) and not (name in _KINDS and value == "0")


def _table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(Text("what"), overflow="fold")
    for name in columns:
        words = name in ("shape", "dtype")
        header = "not finite" if name == "nonfinite" else name
        table.add_column(Text(header), justify="left" if words else "right", overflow="fold")
    for entry in rows:
        table.add_row(Text(text(entry, "what")), *(Text(_value(entry, name)) for name in columns))
    return table


def _line(entry: Mapping[str, Any]) -> Text | None:
    """Returns what the table has no column for."""
    parts = [
        f"{name} {value}"
        for key in list(entry)[:20]
        if key not in (*_COLUMNS, "what")
        and (name := literal(key, 40))
        and (value := _value(entry, key))
    ]
    return Text(f"{text(entry, 'what')}: {', '.join(parts)}") if parts else None


def _value(entry: Mapping[str, Any], key: str) -> str:
    value = entry.get(key)
    if isinstance(value, list):
        words = numbers(entry, key)
        return "x".join(words[:8]) or "scalar" if key == "shape" else listed(words, 8)
    return number(value) or literal(value, 40)
