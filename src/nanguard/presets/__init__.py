"""Stable configurations to begin with, each value with its reason and when to change it."""

from __future__ import annotations

from nanguard.presets.choice import FAMILIES, LEVELS, PRECISIONS, Choice
from nanguard.presets.files import File, files_of
from nanguard.presets.tasks import TASKS

__all__ = ["FAMILIES", "LEVELS", "PRECISIONS", "TASKS", "Choice", "File", "files_of"]
