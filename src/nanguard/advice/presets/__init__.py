"""Stable configurations to begin with, each value with its reason and when to change it."""

from __future__ import annotations

from nanguard.advice.presets.choice import FAMILIES, LEVELS, PRECISIONS, Choice
from nanguard.advice.presets.files import File, files_of
from nanguard.advice.presets.tasks import TASKS

__all__ = ["FAMILIES", "LEVELS", "PRECISIONS", "TASKS", "Choice", "File", "files_of"]
