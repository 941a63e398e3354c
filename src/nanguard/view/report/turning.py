"""Which numbers left their usual range before a run went bad, and in which order."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from nanguard.view.runs.model import Panel
from nanguard.view.runs.thinning import restarts_of

if TYPE_CHECKING:
    from nanguard.view.runs.model import Curve, Run

# Points before the turn that are looked at, and how many of them show what is usual.
_LOOKED_AT = 400
_USUAL = 100
_FEWEST = 12
# How far above what is usual: in deviations, and as a factor.
_DEVIATIONS = 8.0
_FACTOR = 1.5
_WATCHED = (Panel.GRAD_NORM, Panel.TERMS, Panel.LOSS, Panel.SCALE)


@dataclass(frozen=True, slots=True)
class Move:
    """A number that left its usual range and did not come back.

    Attributes:
        name: The curve.
        step: Where it left.
        usual: What was usual before.
        then: The last value before the turn.
    """

    name: str
    step: float
    usual: float
    then: float


def moves_before(run: Run, turn: float) -> list[Move]:
    """Returns what moved before a step, the first one first."""
    found = [
        move
        for panel in _WATCHED
        for curve in run.of(panel)
        if not curve.evaluation and (move := _move(curve, turn)) is not None
    ]
    return sorted(found, key=lambda move: move.step)


def _move(curve: Curve, turn: float) -> Move | None:
    if restarts_of(curve.xs) != []:
        return None
    end = bisect_left(curve.xs, turn)
    begin = max(0, end - _LOOKED_AT)
    values = [value for value in curve.values[begin:end] if math.isfinite(value)]
    # What is not finite in between would shift the places.
    if len(values) < max(_FEWEST, end - begin):
        return None
    usual = values[: max(_FEWEST // 2, min(_USUAL, len(values) // 2))]
    middle = median(usual)
    spread = 1.4826 * median(abs(value - middle) for value in usual)
    if curve.panel is Panel.SCALE:
        away = [value < middle / 4 for value in values]
    else:
        limit = max(middle + _DEVIATIONS * spread, middle + (_FACTOR - 1) * abs(middle))
        away = [value > limit for value in values]
    if not away[-1]:
        return None
    left = len(away) - next((n for n, gone in enumerate(reversed(away)) if not gone), len(away))
    if left < len(usual):
        return None
    return Move(curve.name, curve.xs[begin + left], middle, values[-1])
