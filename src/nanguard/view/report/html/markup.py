"""HTML in which every string of a stranger is text: what is not made here is escaped."""

from __future__ import annotations

from html import escape
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from nanguard.view.report.words import branch, whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# Lines of a listing, and characters of each, that are shown.
_MOST_LINES = 400
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
        for number, text in enumerate(lines[:_MOST_LINES], first)
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
    rows = text.rstrip("\n").split("\n", _MOST_LINES)
    if len(rows) > _MOST_LINES:
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


def incident_id(run: int, incident: int) -> str:
    """Returns the anchor of an incident."""
    return f"incident-{run}-{incident}"


def step_words(step: float | None) -> str:
    """Returns a step as it is shown: 12 345."""
    if step is None:
        return "unknown"
    if float(step).is_integer():
        return f"{step:,.0f}".replace(",", "\u202f")
    return f"{step:g}"


# Characters of any other text that are shown.
LIMIT = 4000
_VOID = frozenset(("br", "hr", "meta", "input", "link", "img"))


class Html(str):
    """Markup that may stand in a page as it is."""

    __slots__ = ()


def shown(value: Any, limit: int = LIMIT) -> str:
    """Returns a text as people can read it safely.

    Control characters, escape sequences and marks that turn the direction of text are made
    visible; what is too long is cut, and says so.

    Args:
        value: Anything.
        limit: How many characters are shown.
    """
    given = value if isinstance(value, str) else str(value)
    safe = "".join(
        c if c.isprintable() or c in "\n\u202f\xa0" else c.encode("unicode_escape").decode()
        for c in given[:limit].replace("\r\n", "\n").expandtabs(4)
    )
    if len(given) > limit:
        safe += f" … (cut: {len(given)} characters in all)"
    return safe


def el(tag: str, *children: Any, **attributes: Any) -> Html:
    """Returns an element.

    Args:
        tag: Its name.
        children: Markup, texts, lists of both; None is left out.
        attributes: Its attributes: ``cls`` is the class, ``data_x`` is ``data-x``; None and False
            are left out, True stands without a value.
    """
    head = "".join(_attribute(name, value) for name, value in attributes.items())
    if tag in _VOID:
        return Html(f"<{tag}{head}>")
    return Html(f"<{tag}{head}>{''.join(_flat(children))}</{tag}>")


def join(parts: Iterable[Any]) -> Html:
    """Returns parts one after the other."""
    return Html("".join(_flat(parts)))


def theme_button() -> Html:
    """Returns the button that changes between light and dark."""
    return el(
        "button",
        "Dark",
        type="button",
        id="theme",
        aria_pressed="false",
        aria_label="Dark colours",
    )


def _attribute(name: str, value: Any) -> str:
    if value is None or value is False:
        return ""
    name = "class" if name == "cls" else name.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(shown(value, 1000), quote=True)}"'


def _flat(children: Iterable[Any]) -> Iterable[str]:
    for child in children:
        if isinstance(child, Html):
            yield child
        elif isinstance(child, (list, tuple)):
            yield from _flat(child)
        elif child is not None:
            yield escape(shown(child), quote=False)
