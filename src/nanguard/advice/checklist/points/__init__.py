"""The points of the checklist: one module for each section, one entry for each point."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanguard.advice.checklist.point import Point


def all_points() -> tuple[Point, ...]:
    """Returns every point, in the order in which a run meets them."""
    from nanguard.advice.checklist.points.data import DATA
    from nanguard.advice.checklist.points.keeping import KEEPING
    from nanguard.advice.checklist.points.model import MODEL
    from nanguard.advice.checklist.points.settings import SETTINGS
    from nanguard.advice.checklist.points.step import STEP

    return (*DATA, *MODEL, *STEP, *SETTINGS, *KEEPING)
