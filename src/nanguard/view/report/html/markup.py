"""HTML in which every string of a stranger is text: what is not made here is escaped."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

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
    told = "".join(
        c if c.isprintable() or c in "\n\u202f\xa0" else c.encode("unicode_escape").decode()
        for c in given[:limit].replace("\r\n", "\n").expandtabs(4)
    )
    if len(given) > limit:
        told += f" … (cut: {len(given)} characters in all)"
    return told


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
