"""The prevention checklist of a project: what is done, what is not, and what cannot be told."""

from __future__ import annotations

from nanguard.advice.checklist.answering import Checklist, fill_in
from nanguard.advice.checklist.point import Answer, Point, Verdict
from nanguard.advice.checklist.points import all_points

__all__ = ["Answer", "Checklist", "Point", "Verdict", "all_points", "fill_in"]
