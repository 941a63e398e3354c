"""The lines of source around an origin, with an arrow."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from nanguard.view.report.fields import branch, source, text, whole

if TYPE_CHECKING:
    from collections.abc import Mapping

_AROUND = 3
_LARGEST_FILE = 4 << 20


def excerpt(origin: Mapping[str, Any], folder: Any) -> Table | Text | None:
    """Returns the source at an origin; only its own line if no more is known to be true.

    Args:
        origin: The origin, as an incident holds it.
        folder: Where the run was started, for a file without a full path.
    """
    line = whole(origin, "line")
    if line is None:
        return _alone(origin)
    kept = branch(origin, "excerpt")
    first, lines = whole(kept, "first"), kept.get("lines")
    if first is None or not isinstance(lines, list) or not first <= line < first + len(lines):
        first, lines = 1, _on_disk(origin, line, folder)
    return _numbered(first, lines, line) if lines else _alone(origin)


def _alone(origin: Mapping[str, Any]) -> Text | None:
    code = text(origin, "code")
    return Text(f"-> {code}", overflow="fold") if code else None


def _on_disk(origin: Mapping[str, Any], line: int, folder: Any) -> list[str]:
    """Returns the lines of the file, if it is still the one that ran."""
    file, code = origin.get("file"), origin.get("code")
    if not isinstance(file, str) or not isinstance(code, str) or not code.strip():
        return []
    try:
        path = Path(folder if isinstance(folder, str) else "", file)
        # Nothing but source: a stranger could name a file with secrets, or one that never ends.
        if path.suffix != ".py" or not path.is_file() or path.stat().st_size > _LARGEST_FILE:
            return []
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except (OSError, ValueError):
        return []
    same = 1 <= line <= len(lines) and lines[line - 1].strip() == code.strip()
    return lines if same else []


def _numbered(first: int, lines: list[Any], line: int) -> Table:
    begin = max(first, line - _AROUND)
    end = min(first + len(lines) - 1, line + _AROUND)
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for number in range(begin, end + 1):
        here = number == line
        table.add_row(
            Text(
                f"{'->' if here else '  '} {number:>{len(str(end))}} |", style="" if here else "dim"
            ),
            Text(source(lines[number - first]), style="bold" if here else ""),
        )
    return table
