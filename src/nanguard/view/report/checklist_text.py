"""A filled-in checklist for people and for programs."""

from __future__ import annotations

import json
import textwrap
from itertools import groupby
from typing import TYPE_CHECKING

from nanguard.advice.checklist_points import PointVerdict
from nanguard.view.report.fields import literal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.advice.checklist import Checklist
    from nanguard.advice.checklist_points import Answer, TracePlace

_STYLES = {PointVerdict.YES: "32", PointVerdict.NO: "1;31", PointVerdict.UNKNOWN: "33"}
_MARGIN = 15
_SHOWN = {PointVerdict.YES: 1, PointVerdict.NO: 3, PointVerdict.UNKNOWN: 0}


def as_json(checklist: Checklist) -> str:
    """Returns a checklist as one JSON object."""
    return json.dumps(checklist.to_json(), indent=1) + "\n"


def as_text(checklist: Checklist, *, colour: bool = False, width: int = 100) -> str:
    """Returns a checklist section by section, with the place of every answer.

    Args:
        checklist: The checklist.
        colour: Whether to use colour.
        width: How wide the terminal is.
    """
    lines: list[str] = []
    for section, answers in groupby(checklist.answers, key=lambda answer: answer.point.section):
        lines.append(_styled(section, "1;4", colour=colour))
        for answer in answers:
            lines += _answer(answer, colour=colour, width=width)
        lines.append("")
    if checklist.not_checked:
        lines.append(_styled("not checked", "1;4", colour=colour))
        for entry in checklist.not_checked[:20]:
            lines.append(f"  {literal(entry.path)}: {literal(entry.reason, 300)}")
        hidden = len(checklist.not_checked) - 20
        lines += [f"  and {hidden} more"] if hidden > 0 else []
        lines.append("")
    return "\n".join([*lines, _summary(checklist)]) + "\n"


def _answer(answer: Answer, *, colour: bool, width: int) -> Iterator[str]:
    word = answer.verdict.value.ljust(_MARGIN - 2)
    word = _styled(word, _STYLES[answer.verdict], colour=colour)
    yield f"  {word}{answer.point.question} [{answer.point.name}]"
    shown = answer.places[: _SHOWN[answer.verdict]]
    for what, places in groupby(shown, key=lambda place: place.what):
        where = ", ".join(_where(place) for place in places)
        yield from _wrapped(f"{where}: {literal(what, 300)}", width)
    others = answer.more + len(answer.places) - len(shown)
    if others:
        yield from _wrapped(f"and {others} more", width)
    if answer.verdict is not PointVerdict.YES:
        yield from _wrapped(f"do: {answer.point.advice}", width)


def _where(place: TracePlace) -> str:
    return literal(place.path if place.line is None else f"{place.path}:{place.line}", 300)


def _wrapped(text: str, width: int) -> list[str]:
    margin = " " * _MARGIN
    return textwrap.wrap(
        text,
        max(40, width),
        initial_indent=margin,
        subsequent_indent=margin + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _summary(checklist: Checklist) -> str:
    counts = ", ".join(f"{checklist.count(verdict)} {verdict.value}" for verdict in PointVerdict)
    files = len(checklist.checked)
    return f"{counts}; {files} {'file' if files == 1 else 'files'} checked"


def _styled(text: str, style: str, *, colour: bool) -> str:
    return f"\x1b[{style}m{text}\x1b[0m" if colour else text
