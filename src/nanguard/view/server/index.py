"""Looks after all runs below a folder, in a thread of its own: only what changed is opened."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from nanguard.check.log.log_reader import LOG_HEAD_BYTES
from nanguard.view.runs.run_finder import DEEPEST, MOST_FILES, PASSED, runs_in
from nanguard.view.server.overview import Digest, RunSummary, changed_at

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.view.runs import FoundRun

# Runs that are looked after; more are counted and not shown.
MOST_RUNS = 5000
# Folders of incidents, whose content belongs to the run above them.
_INNER = frozenset(("incidents",))
_MOST_INNER = 400

FolderMark = tuple[object, ...]
RunMark = tuple[tuple[str, int, int, int], ...]

# Seconds between two looks at a run that somebody looks at, or that has just changed.
SOON = 1.0
# The longest time between two looks at a run that does not change.
_LATE = 15.0
# Seconds after which a run is not expected to change soon.
_QUIET = 600.0
# Seconds between two searches for new runs, while there are some and when there are none.
_SEARCH = 3.0
_SEARCH_LATE = 15.0
# Seconds after which it is the turn of the next run, however much there is left to be read.
_TURN = 5.0
# Seconds after which nobody looks at a run any more.
_LOOKED = 5.0


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
        self._known: dict[Path, tuple[FolderMark, list[str], list[FoundRun]]] = {}

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
        place = os.fsencode(found.path.relative_to(self.root))
        return hashlib.sha256(place).hexdigest()[:16]

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

    def _mark(self, place: Path, files: dict[str, int], folders: list[str]) -> FolderMark:
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


@dataclass(slots=True)
class ServedRun:
    """A run in the index.

    Attributes:
        key: What it is called in addresses.
        found: Its files.
        digest: What keeps its summary.
        version: The version of the index at which its summary changed last.
        mark: Sizes and times of its files when they were read.
        due: When it is looked at again.
        wait: How long after that.
        announced: The state and the number of points of the last version.
        html: The row of a version in the overview, and which.
    """

    key: str
    found: FoundRun
    digest: Digest = field(default_factory=Digest)
    version: int = 0
    mark: RunMark | None = None
    due: float = 0.0
    wait: float = SOON
    announced: tuple[str, int] = ("", 0)
    html: tuple[int, str] = (-1, "")

    @property
    def summary(self) -> RunSummary:
        """What is known about it."""
        return self.digest.summary


class Index:
    """The runs below a folder and what is known about each.

    Attributes:
        folder: The folder.
        version: Grows with each change, and from one server to the next: a page that was open
            before asks for what is new since then.
        searched: Whether the folder was searched at least once.
        entries: The runs by their keys; replaced, never changed, when there are others.
    """

    def __init__(self, root: Path) -> None:
        self.folder = Folder(root)
        self.version = time.time_ns() // 1_000_000
        self.searched = False
        self.entries: dict[str, ServedRun] = {}
        self._looked: dict[str, float] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="index", daemon=True)

    def start(self) -> None:
        """Begins to search and to read."""
        self._thread.start()

    def stop(self) -> None:
        """Ends it at the next opportunity."""
        self._stopping.set()

    def look(self, key: str) -> ServedRun | None:
        """Returns a run that somebody looks at, which is then looked after more often."""
        self._looked[key] = time.monotonic()
        return self.entries.get(key)

    def newest_first(self) -> list[ServedRun]:
        """Returns the runs, those that changed last first."""
        return sorted(
            self.entries.values(), key=lambda entry: (-entry.summary.changed, entry.found.name)
        )

    def _work(self) -> None:
        search, wait = 0.0, _SEARCH
        while not self._stopping.is_set():
            now = time.monotonic()
            if now >= search:
                wait = _SEARCH if self._search_safely() else min(_SEARCH_LATE, wait * 1.5)
                # A large tree must not keep a processor busy.
                least = 50 * (time.monotonic() - now)
                search = time.monotonic() + max(SOON if self._watched() else wait, least)
            for entry in self._due():
                if self._stopping.is_set():
                    return
                self._refresh(entry)
            self._stopping.wait(0.5 if self._watched() else SOON)

    def _search_safely(self) -> bool:
        """Looks for runs; a file that goes away meanwhile must not end the looking."""
        try:
            return self._search()
        except OSError as error:
            self.folder.problems.append(f"{error.filename}: {error.strerror or error}")
            return False

    def _search(self) -> bool:
        """Looks for runs that came or went; returns whether there were any."""
        found = self.folder.runs()
        old, version = self.entries, self.version + 1
        new = {
            key: old.get(key) or ServedRun(key, run, version=version) for key, run in found.items()
        }
        changed = new.keys() != old.keys() or not self.searched
        for key, entry in new.items():
            if entry.found is not found[key]:
                entry.found, entry.due, changed = found[key], 0.0, True
            if not entry.summary.changed:
                entry.summary.changed = changed_at(entry.found)
        if changed:
            # Whoever sees the version must find what it stands for.
            self.entries = new
            self.version = version
        self.searched = True
        return changed

    def _watched(self) -> bool:
        late = time.monotonic() - _LOOKED
        self._looked = {key: when for key, when in self._looked.copy().items() if when > late}
        return bool(self._looked)

    def _due(self) -> Iterator[ServedRun]:
        for entry in self.newest_first():
            if time.monotonic() >= entry.due or entry.key in self._looked:
                yield entry

    def _refresh(self, entry: ServedRun) -> None:
        began = time.monotonic()
        mark = mark_of(entry.found)
        same = mark == entry.mark
        if not same or entry.digest.waiting or not entry.summary.whole:
            entry.mark = mark
            self.folder.confined(entry.found)
            if not self._read(entry):
                return
        if not entry.summary.whole:
            same = False
        quiet = time.time() - entry.summary.changed > _QUIET
        entry.wait = _LATE if quiet else min(_LATE, entry.wait * 2) if same else SOON
        rest = 20 * (time.monotonic() - began) if entry.summary.whole else 0.0
        entry.due = time.monotonic() + max(entry.wait, rest)
        news = (entry.summary.state, entry.summary.points)
        if not same or news != entry.announced:
            entry.announced = news
            entry.version = self.version + 1
            self.version += 1

    def _read(self, entry: ServedRun) -> bool:
        """Reads what has changed, or some of it; returns whether there was time for it."""
        late = time.monotonic() + _TURN
        try:
            for _ in entry.digest.read(entry.found):
                if self._stopping.is_set():
                    return False
                if time.monotonic() > late:
                    break
        except Exception as error:  # noqa: BLE001 - one strange file must not stop all others
            entry.digest.fail(f"it could not be read ({type(error).__name__})", entry.found)
        return True


def mark_of(found: FoundRun) -> RunMark:
    """Returns something that differs once a file of a run has changed."""
    marks = []
    for path in found.files():
        try:
            now = path.stat()
        except OSError:
            marks.append((str(path), 0, -1, 0))
        else:
            marks.append((str(path), now.st_ino, now.st_size, now.st_mtime_ns))
    return tuple(marks)
