"""Checkpoints of a run that goes on: each is read once it is whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nanguard.check.checkpoint.reading import as_run, read_units
from nanguard.check.checkpoint.units import Unit, files_in, units_of

if TYPE_CHECKING:
    from pathlib import Path

    from nanguard.check.checkpoint.checkpoint import Checkpoint
    from nanguard.check.scanning import Scan

    # The files of a checkpoint, with their sizes and when they were last written.
    Looks = tuple[tuple[str, int, int], ...]

# A file that is not whole and was not written to for this many looks will not become whole.
PATIENCE = 5


@dataclass(slots=True)
class _Seen:
    """What is known of a checkpoint.

    Attributes:
        looks: How its files looked last.
        unchanged: For how many looks they have not changed.
        read: What it holds; None as long as it is not whole.
        told: Whether it was told of.
    """

    looks: Looks
    unchanged: int = 0
    read: Checkpoint | None = None
    told: bool = False


@dataclass(slots=True)
class Watcher:
    """Looks at a folder again and again.

    Attributes:
        folder: The folder.
        scan: How to scan.
    """

    folder: Path
    scan: Scan
    _seen: dict[Path, _Seen] = field(default_factory=dict)

    def look(self) -> list[Checkpoint]:
        """Returns the checkpoints that have become whole, or have given up becoming so."""
        if not self.folder.is_dir():
            return []
        new: list[Checkpoint] = []
        there: set[Path] = set()
        for units in units_of(files_in([self.folder])):
            there.update(unit.path for unit in units)
            fresh = [one for one in map(self._followed, units) if one is not None]
            if fresh:
                known = [self._seen[unit.path].read for unit in units]
                as_run([one for one in known if one is not None])
                new += fresh
        for path in set(self._seen) - there:
            del self._seen[path]
        return new

    def _followed(self, unit: Unit) -> Checkpoint | None:
        """Returns a checkpoint if it is time to tell of it."""
        looks = looks_of(unit)
        seen = self._seen.get(unit.path)
        if seen is None or seen.looks != looks:
            self._seen[unit.path] = _Seen(looks)
            return None
        seen.unchanged += 1
        if seen.told:
            return None
        (outline,) = read_units([unit], self.scan, False)  # noqa: FBT003
        if outline.damaged and seen.unchanged < PATIENCE:
            return None
        (seen.read,) = read_units([unit], self.scan, True)  # noqa: FBT003
        seen.told = True
        return seen.read


def looks_of(unit: Unit) -> Looks:
    """Returns what changes when a checkpoint is written: names, sizes and times of its files."""
    found = []
    for file in unit.files:
        try:
            about = file.stat()
        except OSError:
            continue
        found.append((str(file), about.st_size, about.st_mtime_ns))
    return tuple(found)
