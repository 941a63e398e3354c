"""Reads the fields of an incident from a stranger: what is not as it should be is left out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanguard.findings import name_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nanguard.findings import Finding

LINE = 200
# Longer whole numbers are no count of anything; Python refuses to print those beyond 4300 digits.
_LARGEST = 10**18


def literal(value: Any, limit: int = LINE) -> str:
    r"""Returns a string as it can safely be shown on a terminal; empty if it is no string.

    Escape sequences, line breaks, marks that reverse the direction of text and lone surrogates
    become visible, as in ``\x1b``.

    Args:
        value: Anything.
        limit: How many characters are shown.
    """
    if not isinstance(value, str):
        return ""
    shown = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in value[: limit + 1]
    )
    return shown if len(shown) <= limit else f"{shown[:limit]}..."


def source(line: Any) -> str:
    """Returns a line of source, safe to be shown; empty if it is no string."""
    # Cut first: a tab may become four characters.
    return literal(line[: 2 * LINE].expandtabs(4).rstrip()) if isinstance(line, str) else ""


def text(holder: Mapping[str, Any], key: str, limit: int = LINE) -> str:
    """Returns a field that is a string, safe to be shown; empty if it is none."""
    return literal(holder.get(key), limit)


def whole(holder: Mapping[str, Any], key: str) -> int | None:
    """Returns a field that is a count; None if it is none."""
    value = holder.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _LARGEST:
        return None
    return value


def branch(holder: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Returns a field that holds fields; empty if it does not."""
    value = holder.get(key)
    return value if isinstance(value, dict) else {}


def entries(holder: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Returns those members of a list that hold fields."""
    return [entry for entry in _list(holder, key) if isinstance(entry, dict)]


def texts(holder: Mapping[str, Any], key: str) -> list[str]:
    """Returns those members of a list that are strings, safe to be shown."""
    return [literal(entry) for entry in _list(holder, key) if isinstance(entry, str) and entry]


def numbers(holder: Mapping[str, Any], key: str) -> list[str]:
    """Returns those members of a list that are numbers, in words."""
    return [word for entry in _list(holder, key) if (word := number(entry))]


def number(value: Any) -> str:
    """Returns how a number is written, also one whose name JSON holds; empty if it is none."""
    if isinstance(value, str):
        return value if value in ("nan", "inf", "-inf") else ""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return ""
    if isinstance(value, int):
        return str(value) if abs(value) < _LARGEST else ""
    return name_of(value)


def listed(words: Sequence[str], most: int = 10) -> str:
    """Returns a few words, and how many more there are."""
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more


def place_in_words(finding: Finding) -> str:
    """Returns what a finding names besides file and line: a part of it, a step, a rank."""
    step = "" if finding.step is None else f"step {finding.step}"
    rank = "" if finding.rank is None else f"rank {finding.rank}"
    return ", ".join(part for part in (finding.where or "", step, rank) if part)


def _list(holder: Mapping[str, Any], key: str) -> list[Any]:
    value = holder.get(key)
    return value if isinstance(value, list) else []
