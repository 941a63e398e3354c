"""One run that is watched: its files are followed, and what is new in them is judged."""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from nanguard.view.report.fields import literal
from nanguard.view.terminal.reading import LineReader, WholeLogs, progress_in

if TYPE_CHECKING:
    from pathlib import Path

    from nanguard.view.terminal.channels import Happening
    from nanguard.view.terminal.tail import Tail
    from nanguard.view.terminal.watch_state import RunState

# Bytes of one run that are read before the view is drawn again.
_BUDGET = 4 << 20
# A run counts as stalled after so many seconds at least, so many usual times between two lines,
# and so many times the longest pause it made before.
_PATIENCE, _USUAL, _PAUSES = 120.0, 20.0, 3.0
_FEWEST = 5
# Seconds without a line after which a run that said so, or made its last step, has ended.
_QUIET, _QUIET_AFTER_LAST = 5.0, 60.0
# Judging takes at most one part of the time in so many.
_SHARE = 20.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be watched, and how.

    Attributes:
        paths: Logs and run folders.
        wait: Whether a file that is not there yet is waited for.
        once: Whether only what is there is read.
        total: How many steps there will be; None if nobody says it.
        stall: Seconds without a line that are an alarm; None to learn it, 0 for never.
        pid: The process whose end is the end of the run.
    """

    paths: tuple[str, ...]
    wait: bool = False
    once: bool = False
    total: int | None = None
    stall: float | None = None
    pid: int | None = None


@dataclass(slots=True)
class FollowedFile:
    """A file and who reads it."""

    tail: Tail
    reader: LineReader | None = None


@dataclass(slots=True)
class WatchedRun:
    """One run that is watched.

    Attributes:
        path: Where it is.
        state: What is known about it.
        files: The files that are followed line by line.
        whole: Those that are read as a whole.
        reading: Whether what was there before is still being read.
        stalled: Whether its log has stopped to grow.
    """

    path: Path
    state: RunState
    files: list[FollowedFile]
    wanted: Wanted
    whole: WholeLogs = field(default_factory=WholeLogs)
    reading: bool = True
    stalled: bool = False
    _began: float = field(default_factory=time.monotonic)
    _gaps: deque[float] = field(default_factory=lambda: deque(maxlen=200))
    _next: float = 0.0

    @property
    def problem(self) -> str:
        """Why its files cannot be read at the moment; nothing if they can."""
        return next((one.tail.problem for one in self.files if one.tail.problem), "")

    @property
    def share(self) -> float:
        """How much of what is there was read."""
        size = sum(one.tail.size - one.tail.skipped for one in self.files)
        done = sum(one.tail.offset - one.tail.skipped for one in self.files)
        return done / size if size > 0 else 1.0

    def look(self) -> list[Happening]:
        """Reads what is new; returns what is to be told."""
        told: list[Happening] = []
        more = False
        grew = self._read_whole(told)
        for one in self.files:
            more_of_it, new, grew_here = self._follow(one)
            told += new
            more, grew = more or more_of_it, grew or grew_here
        if grew:
            self._note_growth()
        if not more and self.reading:
            told += self._judge(old=not self.wanted.once)
            self.reading = False
            told += self._still_bad()
        elif self.state.urgent or time.monotonic() >= self._next:
            told += self._judge(old=self.reading and not self.wanted.once)
        return told + self._see_whether_stalled()

    def finish(self) -> list[Happening]:
        """Reads last lines that have no end; returns what is to be told."""
        told: list[Happening] = []
        for one in self.files:
            left = one.tail.rest()
            if left and one.reader is not None:
                told += self.state.take(one.reader.read(left, ended=False), old=False)
        return told + self._judge(old=False)

    def ended(self) -> bool:
        """Returns whether the run has come to its end."""
        if self.wanted.pid is not None and not _is_alive(self.wanted.pid):
            return not self.reading
        since = time.monotonic() - (self.state.grown or self._began)
        said = self.state.ended and since > _QUIET
        # A last evaluation may still follow the last step.
        done = self.state.reached_total() and since > _QUIET_AFTER_LAST
        return (said or done) and not self.reading

    def close(self) -> None:
        """Lets go of the files."""
        for one in self.files:
            one.tail.close()

    def _read_whole(self, told: list[Happening]) -> bool:
        """Reads files that have changed from their beginning; returns whether any has."""
        logs = self.whole.look()
        for log in logs:
            told += self.state.take_whole(log, old=self.reading and not self.wanted.once)
        if logs and self.wanted.once:
            self.state.count_to(*progress_in(self.whole.last_words()))
        return bool(logs)

    def _judge(self, *, old: bool) -> list[Happening]:
        if not self.state.unjudged:
            return []
        began = time.monotonic()
        told = self.state.judge(old=old)
        self._next = time.monotonic() + _SHARE * (time.monotonic() - began)
        return told

    def _follow(self, one: FollowedFile) -> tuple[bool, list[Happening], bool]:
        told: list[Happening] = []
        done = 0
        while True:
            piece = one.tail.look()
            for news in piece.news:
                told += self._tell_news(one, news)
            done += len(piece.text)
            if piece.text:
                if one.reader is None:
                    one.reader = LineReader(one.tail.path, one.tail.head())
                old = one.tail.offset <= one.tail.old
                if not old and self.reading:
                    # What stood there before is judged before anything new is added to it.
                    told += self._judge(old=True)
                told += self.state.take(one.reader.read(piece.text), old=old)
            if not piece.more or done > _BUDGET:
                return piece.more, told, done > 0

    def _tell_news(self, one: FollowedFile, news: str) -> list[Happening]:
        name = literal(one.tail.path.name, 80)
        if news == "deleted":
            return self.state.tell("deleted", f"{name} was deleted; it is followed if it returns")
        one.reader = None
        if news == "opened":
            if not one.tail.skipped:
                return []
            return self.state.tell("long", f"only the last 64 MiB of {name} are read")
        said = {"truncated": "was emptied", "rotated": "was replaced"}.get(news, "is there again")
        return self.state.tell(news, f"{name} {said}; what is new in it is read from its beginning")

    def _note_growth(self) -> None:
        now = time.monotonic()
        if self.state.grown is not None and not self.reading:
            self._gaps.append(now - self.state.grown)
        written = max([self.whole.written, *(one.tail.written for one in self.files)])
        age = time.time() - written if self.reading else 0.0
        self.state.grown = now - max(0.0, age)
        self.stalled = False

    def _still_bad(self) -> list[Happening]:
        """Returns an alarm for what was bad before the watch began, and still is."""
        bad = self.state.bad_loss()
        if not bad or self.wanted.once:
            return []
        return self.state.tell("non-finite-loss", f"{bad}, since before the watch", alarm=True)

    def _see_whether_stalled(self) -> list[Happening]:
        limit = self._limit()
        since = time.monotonic() - (self.state.grown or self._began)
        if self.stalled or self.reading or limit is None or since < limit or self.ended():
            return []
        self.stalled = True
        usual = f"; {median(self._gaps):.1f} s are usual" if self._gaps else ""
        return self.state.tell("stalled", f"nothing new for {since:.0f} s{usual}", alarm=True)

    def _limit(self) -> float | None:
        if self.wanted.once or self.wanted.stall == 0:
            return None
        if self.wanted.stall is not None:
            return self.wanted.stall
        if len(self._gaps) < _FEWEST:
            return None
        return max(_PATIENCE, _USUAL * median(self._gaps), _PAUSES * max(self._gaps))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
