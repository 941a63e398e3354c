"""Shapes of lines: a run writes millions of lines that differ in their numbers only.

A line that was read once gives a pattern in which every number is open and every other
character fixed. Lines of the same shape then need no reading: their numbers are taken out.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nanguard.check.log.gathering import Which

if TYPE_CHECKING:
    from nanguard.check.log.grammar import Line, Value

LONGEST = 2000
_NUMBER = re.compile(
    r"(?<![A-Za-z_0-9.])(?:(?<![0-9A-Za-z)\]])[-+])?[0-9][0-9.]*(?:[eE][-+]?[0-9]+)?"
)
_BAR = re.compile(r"([▏▎▍▌▋▊▉█#━╸╺ ]{4,}|(?<=\[)[=>.]{4,}(?=\]))")
_SPECIAL = re.compile(r"([\\.^$*+?{}\[\]|()])")
# What stands beside an open part never matches it too, so that no line takes long to refuse. The
# sign of a number stands first, that of its exponent behind the e: "1e5-1e5-1e5" has one reading.
_GOES_ON = frozenset("eE.")
_ANY_WHOLE = "[0-9.]+"
_ANY_NUMBER = "[-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?"
_ANY_BAR = "[▏▎▍▌▋▊▉█#━╸╺ ]+"
_ANY_ARROW = "[=>.]+"


@dataclass(slots=True)
class Shape:
    """The shape of a line, and what its numbers are.

    Attributes:
        pattern: A regular expression for the whole line, the same for every engine.
        step: The group that holds the step, from 0; None if the shape has none.
        epoch: The group that holds the epoch.
        columns: The group that holds each metric's number.
        fixed: Metrics that are part of the shape: NaN and Inf are words.
        percent: The metrics that are written in percent.
        compiled: The pattern for lines one by one.
    """

    pattern: str
    step: int | None
    epoch: int | None
    columns: dict[Which, int]
    fixed: dict[Which, float]
    percent: frozenset[Which]
    compiled: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        self.compiled = re.compile(self.pattern)


def shape_of(text: str, line: Line) -> Shape | None:
    """Returns the shape of a line that was read; None if it has none."""
    if not line.values or len(text) > LONGEST:
        return None
    wanted = {v.start: v for v in (*line.values, line.step, line.epoch) if v is not None}
    order: list[Value] = []
    out: list[str] = []
    at = 0
    for start, end in _spans(text, wanted):
        # "7e-7e-7" can be read as numbers in many ways.
        if text[end : end + 1] in _GOES_ON:
            return None
        out.append(_fixed(text[at:start]))
        value = wanted.get(start)
        if value is None:
            plain = text[start:end].strip("0123456789.") == ""
            out.append(_ANY_WHOLE if plain else _ANY_NUMBER)
        else:
            if value.end != end:
                return None
            order.append(value)
            out.append(f"({_ANY_NUMBER})")
        at = end
    out.append(_fixed(text[at:]))
    opened = [v for v in wanted.values() if math.isfinite(v.number)]
    if len(order) != len(opened) or len({v.start for v in opened}) != len(opened):
        return None
    if any(math.isfinite(v.number) and v not in order for v in line.values):
        return None  # two of them are read from one place
    return _shape("^" + "".join(out) + "$", order, line, text)


def _shape(pattern: str, order: list[Value], line: Line, text: str) -> Shape:
    columns: dict[Which, int] = {}
    fixed: dict[Which, float] = {}
    percent: set[Which] = set()
    for value in line.values:
        which = Which(value.metric, line.label, line.rank)
        if not math.isfinite(value.number):
            fixed.setdefault(which, value.number)
            continue
        columns.setdefault(which, order.index(value))
        written = float(text[value.start : value.end])
        if written and not math.isclose(value.number, written):
            percent.add(which)
    return Shape(
        pattern,
        order.index(line.step) if line.step in order else None,
        order.index(line.epoch) if line.epoch in order else None,
        columns,
        fixed,
        frozenset(percent),
    )


def _spans(text: str, wanted: dict[int, Value]) -> list[tuple[int, int]]:
    return [
        match.span()
        for match in _NUMBER.finditer(text)
        if match.start() not in wanted or math.isfinite(wanted[match.start()].number)
    ]


def _fixed(text: str) -> str:
    """Returns a pattern for what stands between numbers; widths and progress bars are open."""
    out: list[str] = []
    for number, part in enumerate(_BAR.split(text)):
        if number % 2:
            out.append(_ANY_BAR if part.strip("=>.") else _ANY_ARROW)
        else:
            out.append(_words(part))
    return "".join(out)


def _words(text: str) -> str:
    escaped = _SPECIAL.sub(r"\\\1", text)
    spaced = re.sub(r" {2,}", " +", escaped)
    if text.startswith(" ") and not spaced.startswith(" +"):
        spaced = " +" + spaced[1:]
    if text.endswith(" ") and len(text) > 1 and not spaced.endswith(" +"):
        spaced = spaced[:-1] + " +"
    return spaced
