"""Which runs lie below a folder, looked at again and again: only what changed is opened."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from nanguard.check.log.log_reader import LOG_HEAD_BYTES
from nanguard.view.runs.run_finder import DEEPEST, MOST_FILES, PASSED, runs_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.view.runs import FoundRun

MOST_RUNS = 5000
# Folders of incidents, whose content belongs to the run above them.
_INNER = frozenset(("incidents",))
_MOST_INNER = 400

Mark = tuple[object, ...]


class Folder:
    """The runs below a folder.

    Attributes:
        root: The folder, without links in its path.
        problems: Folders that could not be read, and why.
        left_out: Whether there are more runs than are looked at.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.problems: list[str] = []
        self.left_out = False
        self._known: dict[Path, tuple[Mark, list[str], list[FoundRun]]] = {}

    def runs(self) -> dict[str, FoundRun]:
        """Returns the runs by their keys, as they are now."""
        self.problems = []
        known, found = self._known, {}
        self._known = {}
        for place, files, folders in self._walk():
            mark = self._mark(place, files, folders)
            old = known.get(place)
            if old is None or old[0] != mark:
                names = sorted(folders)
                here = [self.confined(run) for run in runs_in(place, sorted(files), names)]
                old = (mark, names, [run for run in here if run.files()])
            self._known[place] = old
            folders[:] = old[1]
            for run in old[2]:
                found[self.key(run)] = run
                if len(found) >= MOST_RUNS:
                    self.left_out = True
                    return found
        return found

    def key(self, found: FoundRun) -> str:
        """Returns what a run is called in addresses: nothing that could be a path."""
        told = os.fsencode(found.path.relative_to(self.root))
        return hashlib.sha256(told).hexdigest()[:16]

    def is_inside(self, path: Path) -> bool:
        """Returns whether a path, all links followed, lies below the folder."""
        try:
            return path.resolve().is_relative_to(self.root)
        except (OSError, RuntimeError):
            return False

    def confined(self, found: FoundRun) -> FoundRun:
        """Returns a run without the files to which a link leads out of the folder."""
        for name in ("logs", "reports", "configs", "incidents", "left_out"):
            setattr(found, name, [path for path in getattr(found, name) if self.is_inside(path)])
        for name in ("events", "history", "lineage"):
            path = getattr(found, name)
            if path is not None and not self.is_inside(path):
                setattr(found, name, None)
        from nanguard.incident import NAME

        found.incidents = [path for path in found.incidents if self.is_inside(path / NAME)]
        return found

    def _walk(self) -> Iterator[tuple[Path, dict[str, int], list[str]]]:
        """Yields folders with the sizes of their files; links to folders are not followed."""
        waiting = [(self.root, 0)]
        while waiting:
            place, deep = waiting.pop()
            files: dict[str, int] = {}
            folders: list[str] = []
            try:
                with os.scandir(place) as entries:
                    for entry in entries:
                        self._sort_in(entry, files, folders)
            except OSError as error:
                self.problems.append(f"{place}: it cannot be read ({error.strerror or error})")
                continue
            yield place, files, folders
            if deep < DEEPEST:
                waiting += [(place / name, deep + 1) for name in sorted(folders, reverse=True)]

    def _sort_in(self, entry: os.DirEntry[str], files: dict[str, int], folders: list[str]) -> None:
        try:
            if entry.is_dir(follow_symlinks=False):
                if entry.name not in PASSED:
                    folders.append(entry.name)
                return
            leads_out = entry.is_symlink() and not self.is_inside(Path(entry.path))
            if len(files) < MOST_FILES and entry.is_file() and not leads_out:
                # Beyond its head, growth does not change what a file is.
                files[entry.name] = min(entry.stat().st_size, LOG_HEAD_BYTES)
        except OSError:
            return

    def _mark(self, place: Path, files: dict[str, int], folders: list[str]) -> Mark:
        """Returns something that differs once there may be other runs in a folder."""
        inner = tuple(stamp for name in sorted(folders) for stamp in _stamps(place / name, name))
        return (tuple(sorted(files.items())), tuple(sorted(folders)), inner)


def _stamps(path: Path, name: str) -> Iterator[tuple[str, int]]:
    try:
        yield name, path.stat().st_mtime_ns
        if name in _INNER:
            for count, (place, _, _) in enumerate(os.walk(path)):
                if count > _MOST_INNER:
                    return
                yield place, Path(place).stat().st_mtime_ns
    except OSError:
        return
