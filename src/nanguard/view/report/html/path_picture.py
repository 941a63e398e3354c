"""The way of the bad value as a picture: operation by operation, how large the numbers were."""

from __future__ import annotations

import math
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from nanguard.view.report.fields import entries, number, text, whole
from nanguard.view.report.html.markup import Html, el

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nanguard.incident import Incident

_MOST = 40
_ROW = 26
_LEFT = 250
_BAR = 330
_RIGHT = 160
_TOP = 26
# Limits of types that people know, where they lie within the picture.
_LIMITS = ((65504.0, "fp16"), (3.4e38, "fp32"))


def path_picture(incident: Incident, anchor: str) -> Html | None:
    """Returns the picture; None if the incident does not know the way.

    Args:
        incident: The incident.
        anchor: A name that no other picture on the page has.
    """
    rows = [row for row in entries(incident, "path") if text(row, "op")]
    if not rows:
        return None
    shown = rows[-_MOST:]
    low, high = _span(shown)
    height = _TOP + _ROW * len(shown) + 6
    width = _LEFT + _BAR + _RIGHT
    parts = _axis(low, high, height)
    parts += [_row(row, place, (low, high), anchor) for place, row in enumerate(shown)]
    hatch = el(
        "pattern",
        el("rect", width="6", height="6", cls="hatch-ground"),
        el("path", d="M0 6 L6 0", cls="hatch-line"),
        id=f"{anchor}-hatch",
        width="6",
        height="6",
        patternUnits="userSpaceOnUse",
    )
    picture = el(
        "svg",
        el("defs", hatch),
        parts,
        viewBox=f"0 0 {width} {height}",
        width=str(width),
        height=str(height),
        role="img",
        aria_label=_in_words(shown),
        cls="way",
    )
    cut = len(rows) - len(shown)
    return el(
        "figure",
        el("figcaption", _caption(shown), f" ({cut} earlier ones are not shown)" if cut else None),
        el("div", picture, cls="wide", tabindex="0", role="region", aria_label="Path"),
        _table(shown),
    )


def _span(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    sizes = [size for row in rows if (size := _size(row)) is not None and size > 0]
    low = min((math.log10(size) for size in sizes), default=-1.0)
    high = max((math.log10(size) for size in sizes), default=1.0)
    low = max(-46.0, math.floor(min(low, -1.0)))
    return low, min(310.0, max(math.ceil(high), low + 2, 1.0))


def _size(row: Mapping[str, Any]) -> float | None:
    """Returns the largest finite magnitude of a row."""
    found = [abs(v) for key in ("min", "max") if (v := _finite(row.get(key))) is not None]
    return max(found, default=None)


def _finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _bad(row: Mapping[str, Any]) -> bool:
    return bool(whole(row, "nonfinite")) or any(
        row.get(key) in ("nan", "inf", "-inf") for key in ("min", "max")
    )


def _x(size: float, low: float, high: float) -> float:
    return round(_LEFT + _BAR * (size - low) / (high - low), 1)


def _axis(low: float, high: float, height: int) -> list[Html]:
    step = max(1, round((high - low) / 5))
    ticks = [(at, f"1e{at}" if at else "1") for at in range(int(low), int(high) + 1, step)]
    parts = []
    for at, label in ticks:
        x = _x(at, low, high)
        parts.append(el("line", x1=x, x2=x, y1=_TOP - 4, y2=height, cls="grid"))
        parts.append(el("text", label, x=x, y=_TOP - 10, cls="tick", text_anchor="middle"))
    for limit, label in _LIMITS:
        if low < math.log10(limit) <= high:
            x = _x(math.log10(limit), low, high)
            parts.append(el("line", x1=x, x2=x, y1=_TOP - 4, y2=height, cls="limit"))
            parts.append(el("text", label, x=x + 3, y=height - 4, cls="tick limit"))
    return parts


def _row(row: Mapping[str, Any], place: int, span: tuple[float, float], anchor: str) -> Html:
    y, size, bad = _TOP + place * _ROW, _size(row), _bad(row)
    name = text(row, "op", 28).removeprefix("aten.")
    where = _where(row)
    parts: list[Html] = [
        el("text", name, x="0", y=y + 12, cls="op"),
        el("text", where, x="0", y=y + 22, cls="where"),
    ]
    if bad:
        parts.append(
            el(
                "rect",
                x=_LEFT,
                y=y + 4,
                width=_BAR,
                height=14,
                cls="bad",
                fill=f"url(#{anchor}-hatch)",
            )
        )
    elif size is not None:
        end = _x(math.log10(size), *span) if size > 0 else _LEFT
        width = max(2.0, round(end - _LEFT, 1))
        parts.append(el("rect", x=_LEFT, y=y + 4, width=width, height=14, cls="ok"))
    parts.append(el("text", _range(row), x=_LEFT + _BAR + 8, y=y + 15, cls="range"))
    return el("g", parts, cls="bad" if bad else None)


def _where(row: Mapping[str, Any]) -> str:
    file, line, module = row.get("file"), whole(row, "line"), text(row, "module", 40)
    name = PurePath(file).name[:30] if isinstance(file, str) and file else ""
    place = f"{name}:{line}" if name and line is not None else name
    return "  ".join(part for part in (place, module) if part)


def _range(row: Mapping[str, Any]) -> str:
    bad = whole(row, "nonfinite")
    if bad:
        return f"{bad} not finite"
    return f"{number(row.get('min'))} … {number(row.get('max'))}"


def _caption(rows: Sequence[Mapping[str, Any]]) -> str:
    first = next((row for row in rows if _bad(row)), None)
    if first is None:
        return "How large the numbers were on the way to the loss."
    return (
        "How large the numbers were on the way to the loss; "
        f"{text(first, 'op', 60)} is the first that is not finite."
    )


def _in_words(rows: Sequence[Mapping[str, Any]]) -> str:
    return "; ".join(f"{text(row, 'op', 40)} {_range(row)}" for row in rows)[:900]


def _table(rows: Sequence[Mapping[str, Any]]) -> Html:
    names = ("Operation", "Place", "Smallest", "Largest", "Not finite")
    head = el("tr", *(el("th", name, scope="col") for name in names))
    body = [
        el(
            "tr",
            el("td", text(row, "op", 60)),
            el("td", _where(row)),
            el("td", number(row.get("min")), cls="number"),
            el("td", number(row.get("max")), cls="number"),
            el("td", str(whole(row, "nonfinite") or 0), cls="number"),
        )
        for row in rows
    ]
    table = el("table", el("thead", head), el("tbody", body))
    return el("details", el("summary", "The same as a table"), el("div", table, cls="wide"))
