"""Which learned quantity drifted until a step went bad: its name, since when, and its curve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanguard.findings import name_of

if TYPE_CHECKING:
    from nanguard.diagnose.case import Case
    from nanguard.replay.task import Curve

# Operations between a parameter and the origin: what is farther away has no direct part in it.
_NEAR = 6
# A curve of fewer points shows no drift.
_LEAST_POINTS = 6
# Drift is a move of at least this size, and of this many times what the quantity was at first.
_LEAST_MOVE, _TIMES = 2.0, 2.0
# It began where this share of the move was behind it for good.
_BEGUN = 0.1


@dataclass(frozen=True, slots=True)
class Drift:
    """A parameter that moved far away from what it was.

    Attributes:
        name: Its name.
        began: The step from which on it moved away.
        curve: Its element farthest from zero, step by step.
    """

    name: str
    began: int
    curve: Curve

    def in_words(self) -> str:
        """Returns what moved, how far and since when."""
        first, last = name_of(self.curve[0][1]), name_of(self.curve[-1][1])
        return f"{self.name} has drifted from {first} to {last} since step {self.began}"

    def to_json(self) -> dict[str, Any]:
        """Returns the drift as an incident holds it."""
        return {"tensor": self.name, "first_step": self.began, "curve": self.curve}


def drift_behind(case: Case) -> Drift | None:
    """Returns the parameter near the origin that has drifted farthest; None if none has."""
    near = {
        ancestor.name
        for stats in case.inputs
        for ancestor in case.ancestors(stats.name, _NEAR)
        if ancestor.op == "parameter" and ancestor.name
    }
    found = [_drift(name, case.facts.curves[name]) for name in near & set(case.facts.curves)]
    drifts = [drift for drift in found if drift is not None]
    return max(drifts, key=lambda drift: abs(drift.curve[-1][1]), default=None)


def _drift(name: str, curve: Curve) -> Drift | None:
    """Returns a curve as a drift, if it moved far, and not all at once at its end."""
    if len(curve) < _LEAST_POINTS:
        return None
    first, last = curve[0][1], curve[-1][1]
    move = last - first
    if abs(move) < max(_LEAST_MOVE, _TIMES * abs(first)):
        return None
    began = len(curve) - 1
    while began > 0 and (curve[began - 1][1] - first) / move > _BEGUN:
        began -= 1
    # What jumps at its end is an explosion, and no drift.
    return Drift(name, curve[began][0], curve) if began < len(curve) - 3 else None
