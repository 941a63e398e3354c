"""Looks after all runs below a folder, in a thread of its own."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nanguard.view.server.digest import Digest, RunSummary, changed_at
from nanguard.view.server.folder import Folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nanguard.view.runs import FoundRun

Mark = tuple[tuple[str, int, int, int], ...]

# Seconds between two looks at a run that somebody looks at, or that has just changed.
SOON = 1.0
# The longest time between two looks at a run that does not change.
_LATE = 15.0
# Seconds after which a run is not expected to change soon.
_QUIET = 600.0
# Seconds between two searches for new runs, while there are some and when there are none.
_SEARCH = 3.0
_SEARCH_LATE = 15.0
# Seconds after which nobody looks at a run any more.
_LOOKED = 5.0


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
        told: The state and the number of points that the last version told.
        html: The row of a version in the overview, and which.
    """

    key: str
    found: FoundRun
    digest: Digest = field(default_factory=Digest)
    version: int = 0
    mark: Mark | None = None
    due: float = 0.0
    wait: float = SOON
    told: tuple[str, int] = ("", 0)
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

    @property
    def indexed(self) -> bool:
        """Whether every run that is known was read."""
        return self.searched and all(entry.summary.whole for entry in self.entries.values())

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
        if not same or entry.digest.waiting:
            entry.mark = mark
            self.folder.confined(entry.found)
            if not self._read(entry):
                return
        quiet = time.time() - entry.summary.changed > _QUIET
        entry.wait = _LATE if quiet else min(_LATE, entry.wait * 2) if same else SOON
        entry.due = time.monotonic() + max(entry.wait, 20 * (time.monotonic() - began))
        told = (entry.summary.state, entry.summary.points)
        if not same or told != entry.told:
            entry.told = told
            entry.version = self.version + 1
            self.version += 1

    def _read(self, entry: ServedRun) -> bool:
        """Reads what has changed; returns whether there was time for it."""
        try:
            for _ in entry.digest.read(entry.found):
                if self._stopping.is_set():
                    return False
        except Exception as error:  # noqa: BLE001 - one strange file must not stop all others
            entry.digest.fail(f"it could not be read ({type(error).__name__})", entry.found)
        return True


def mark_of(found: FoundRun) -> Mark:
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
