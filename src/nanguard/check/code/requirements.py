"""Which torch a project asks for, as far as the files around the code say."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

_FILES = ("pyproject.toml", "setup.py", "setup.cfg", "requirements.txt", "requirements/base.txt")
_FLOOR = re.compile(r"(?<![\w-])torch\s*>=\s*(\d+)\.(\d+)")
_LARGEST = 256 << 10
_LEVELS = 8


def torch_floor(path: str) -> tuple[int, int] | None:
    """Returns the oldest torch that the project of a file allows; None if it does not say."""
    return _floor(str(Path(path).absolute().parent), _LEVELS)


@lru_cache(maxsize=4096)
def _floor(folder: str, levels: int) -> tuple[int, int] | None:
    place = Path(folder)
    for name in _FILES:
        found = _in_file(place / name)
        if found is not None:
            return found
    if levels == 0 or place.parent == place or (place / ".git").exists():
        return None
    return _floor(str(place.parent), levels - 1)


def _in_file(file: Path) -> tuple[int, int] | None:
    try:
        if not file.is_file() or file.stat().st_size > _LARGEST:
            return None
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    floors = [(int(major), int(minor)) for major, minor in _FLOOR.findall(text)]
    return min(floors, default=None)
