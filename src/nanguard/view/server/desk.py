"""The few runs that are open: read whole, kept while somebody looks at them."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nanguard.view.report.html import page_data, sections
from nanguard.view.report.judged import judge
from nanguard.view.runs.following import LiveRun
from nanguard.view.server.index import mark_of

if TYPE_CHECKING:
    from nanguard.view.runs import Run
    from nanguard.view.server.index import Entry, Index

MOST_OPEN = 8
# Numbers that are kept in memory: with their steps, about 8 bytes each.
_MOST_POINTS = 20_000_000
# Bytes of numbers in a page, which is sent again with every change.
_BUDGET = 600_000


@dataclass(slots=True)
class Open:
    """An open run.

    Attributes:
        live: What reads it.
        version: Names the state in which it was read last.
        run: The run, with findings.
        payload: What its page shows.
        spent: Seconds that it takes to read it again.
        lock: Held while it is read.
    """

    live: LiveRun
    version: str = ""
    run: Run | None = None
    payload: dict[str, Any] = field(default_factory=dict)
    spent: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)


class Desk:
    """Opens runs, and lets go of those that nobody has looked at for the longest time."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._open: OrderedDict[str, Open] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, entry: Entry) -> Open:
        """Returns a run as it is now, with what its page shows."""
        held = self._held(entry)
        with held.lock:
            version = version_of(entry)
            if held.version != version or held.run is None:
                began, first = time.monotonic(), held.run is None
                held.live.found = self._index.folder.confined(entry.found)
                run = held.live.read()
                judge(run)
                held.payload = {
                    "version": version,
                    "page": page_data([run], _BUDGET),
                    "sections": {key: list(part) for key, part in sections([run]).items()},
                    "points": run.points,
                }
                held.run, held.version = run, version
                held.spent = 0.0 if first else time.monotonic() - began
        self._let_go()
        return held

    def cost(self, key: str) -> float:
        """Returns how many seconds it takes to read a run again; 0 if that is not known."""
        held = self._open.get(key)
        return 0.0 if held is None else held.spent

    def _held(self, entry: Entry) -> Open:
        with self._lock:
            held = self._open.get(entry.key)
            if held is None:
                held = self._open[entry.key] = Open(LiveRun(entry.found))
            self._open.move_to_end(entry.key)
            return held

    def _let_go(self) -> None:
        with self._lock:
            points = sum(held.run.points for held in self._open.values() if held.run)
            while len(self._open) > MOST_OPEN or (points > _MOST_POINTS and len(self._open) > 1):
                _, old = self._open.popitem(last=False)
                points -= old.run.points if old.run else 0


def version_of(entry: Entry) -> str:
    """Returns a word that differs once a run has changed."""
    # A last line without an end is read some time later.
    told = (mark_of(entry.found), entry.digest.waiting, str(entry.found.configs))
    return hashlib.sha256(repr(told).encode("utf-8", "replace")).hexdigest()[:16]
