"""Source excerpts, diffs and texts of files."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from nanguard.view.report.fields import branch, whole
from nanguard.view.report.html.markup import Html, el

if TYPE_CHECKING:
    from collections.abc import Mapping

_LINES = 400
_LONGEST = 400


def excerpt(place: Mapping[str, Any]) -> Html | None:
    """Returns the source around a place, as an incident holds it."""
    line, kept = whole(place, "line"), branch(place, "excerpt")
    first, lines = whole(kept, "first"), kept.get("lines")
    if line is None or first is None or not isinstance(lines, list):
        code = place.get("code")
        return _block([el("span", code)]) if isinstance(code, str) and code else None
    rows = [
        el(
            "span",
            el("span", f"{number:>5} ", cls="n", aria_hidden="true"),
            _line(text),
            cls="here" if number == line else None,
        )
        for number, text in enumerate(lines[:_LINES], first)
    ]
    return _block(rows)


def place_words(place: Mapping[str, Any]) -> str:
    """Returns a place in words: train.py:41, in forward."""
    file, line, function = place.get("file"), whole(place, "line"), place.get("function")
    if not isinstance(file, str) or not file:
        return ""
    said = PurePath(file).name + (f":{line}" if line is not None else "")
    return f"{said}, in {function}" if isinstance(function, str) and function else said


def diff(text: Any) -> Html | None:
    """Returns a unified diff."""
    if not isinstance(text, str) or not text.strip():
        return None
    return _block([el("span", _line(row), cls=_kind(row)) for row in _rows(text)], "diff")


def listing(text: str) -> Html:
    """Returns the text of a file."""
    return _block([el("span", _line(row)) for row in _rows(text)])


def _rows(text: str) -> list[str]:
    rows = text.rstrip("\n").split("\n", _LINES)
    if len(rows) > _LINES:
        more = rows.pop().count("\n") + 1
        rows.append(f"… (cut: {more} more lines)")
    return rows


def _line(text: Any) -> str:
    line = text if isinstance(text, str) else ""
    return line[:_LONGEST] + (
        f" … (cut: {len(line)} characters in all)" if len(line) > _LONGEST else ""
    )


def _kind(row: str) -> str | None:
    if row.startswith(("+++", "---")):
        return "file"
    return {"+": "add", "-": "del", "@": "at"}.get(row[:1])


def _block(rows: list[Html], cls: str = "") -> Html:
    code = el("code", [[row, Html("\n")] for row in rows])
    return el("pre", code, cls=cls or None, tabindex="0")
