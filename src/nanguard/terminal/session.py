"""The runs that are watched: which files they are, what is new in them, and what is an alarm."""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from nanguard.errors import SourceError, UsageError
from nanguard.record import EVENTS, METRICS
from nanguard.report.fields import literal
from nanguard.sources.run import find_runs
from nanguard.terminal.reading import LineReader, Unreadable, refuse_binary
from nanguard.terminal.state import RunState
from nanguard.terminal.tail import HEAD, Tail

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import BinaryIO

    from nanguard.terminal.state import Happening

MOST_RUNS = 16
# Bytes of one run that are read before the view is drawn again.
_BUDGET = 4 << 20
# A run counts as stalled after so many seconds at least, so many usual times between two lines,
# and so many times the longest pause it made before.
_PATIENCE, _USUAL, _PAUSES = 120.0, 20.0, 3.0
_FEWEST = 5
# A search for new runs may take this share of the time.
_SEARCH, _SHARE = 5.0, 50.0
# Seconds without a line after which a run that said so has ended.
_QUIET = 3.0


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
class _Followed:
    """A file and who reads it."""

    tail: Tail
    reader: LineReader | None = None
    old: int = -1  # bytes that were there when the watch began


@dataclass(slots=True)
class Watched:
    """One run that is watched.

    Attributes:
        path: Where it is.
        state: What is known about it.
        reading: Whether what was there before is still being read.
        stalled: Whether its log has stopped to grow.
    """

    path: Path
    state: RunState
    files: list[_Followed]
    wanted: Wanted
    reading: bool = True
    stalled: bool = False
    _began: float = field(default_factory=time.monotonic)
    _gaps: deque[float] = field(default_factory=lambda: deque(maxlen=200))

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
        more = grew = False
        for one in self.files:
            more_of_it, new, grew_here = self._follow(one)
            told += new
            more, grew = more or more_of_it, grew or grew_here
        if grew:
            self._note_growth()
        if not more and self.reading:
            self.reading = False
            told += self._still_bad()
        return told + self._see_whether_stalled()

    def finish(self) -> list[Happening]:
        """Reads last lines that have no end; returns what is to be told."""
        told: list[Happening] = []
        for one in self.files:
            left = one.tail.rest()
            if left and one.reader is not None:
                told += self.state.take(one.reader.read(left, ended=False), old=False)
        return told

    def ended(self) -> bool:
        """Returns whether the run has come to its end."""
        if self.wanted.pid is not None and not _is_alive(self.wanted.pid):
            return not self.reading
        state = self.state
        done = state.total is not None and state.step is not None and state.step >= state.total
        since = time.monotonic() - (state.grown or self._began)
        return (state.ended or done) and not self.reading and since > _QUIET

    def close(self) -> None:
        """Lets go of the files."""
        for one in self.files:
            one.tail.close()

    def _follow(self, one: _Followed) -> tuple[bool, list[Happening], bool]:
        told: list[Happening] = []
        done = 0
        while True:
            piece = one.tail.look()
            for news in piece.news:
                told += self._tell_news(one, news)
            done += len(piece.text)
            if piece.text and one.reader is not None:
                old = one.tail.offset <= one.old and not self.wanted.once
                told += self.state.take(one.reader.read(piece.text), old=old)
            if not piece.more or done > _BUDGET:
                return piece.more, told, done > 0

    def _tell_news(self, one: _Followed, news: str) -> list[Happening]:
        name = literal(one.tail.path.name, 80)
        if news == "deleted":
            return self.state.tell("deleted", f"{name} was deleted; it is followed if it returns")
        try:
            one.reader = LineReader(one.tail.path, one.tail.head())
        except Unreadable as error:
            one.reader, one.tail.problem = None, str(error)
            return self.state.tell("unreadable", f"{name}: {error}")
        if one.old < 0:
            one.old = one.tail.size or one.tail.path.stat().st_size
            if not one.tail.skipped:
                return []
            return self.state.tell("long", f"only the last 64 MiB of {name} are read")
        one.old = 0
        said = {"truncated": "was emptied", "rotated": "was replaced"}.get(news, "is there again")
        return self.state.tell(news, f"{name} {said}; what is new in it is read from its beginning")

    def _note_growth(self) -> None:
        now = time.monotonic()
        if self.state.grown is not None and not self.reading:
            self._gaps.append(now - self.state.grown)
        age = time.time() - max(one.tail.written for one in self.files) if self.reading else 0.0
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


class Session:
    """All runs that are watched.

    Attributes:
        runs: The runs, in the order in which they were found.
        left_out: How many runs there are beyond those that are watched.
        missing: What is waited for, and why it cannot be read.
    """

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.runs: list[Watched] = []
        self.left_out = 0
        self.missing: dict[str, str] = {}
        self._known: set[Path] = set()
        self._next = 0.0
        self._search()
        if self.missing and not wanted.wait:
            path, why = next(iter(self.missing.items()))
            raise UsageError(
                f"{why}.",
                where=literal(path, 1000),
                do="Check the path, or give --wait to watch it once it is there.",
            )

    def look(self) -> list[tuple[Watched, Happening]]:
        """Reads what is new everywhere; returns what is to be told."""
        if not self.wanted.once and time.monotonic() >= self._next:
            self._search()
        return [(run, told) for run in self.runs for told in run.look()]

    def finish(self) -> list[tuple[Watched, Happening]]:
        """Reads last lines that have no end; returns what is to be told."""
        return [(run, told) for run in self.runs for told in run.finish()]

    @property
    def reading(self) -> bool:
        """Whether what was there before is still being read."""
        return any(run.reading for run in self.runs)

    def ended(self) -> bool:
        """Returns whether all runs have come to their end."""
        return bool(self.runs) and not self.missing and all(run.ended() for run in self.runs)

    def close(self) -> None:
        """Lets go of all files."""
        for run in self.runs:
            run.close()

    def _search(self) -> None:
        began = time.monotonic()
        self.missing = {}
        for given in self.wanted.paths:
            path = Path(given)
            try:
                for place, files in _runs_at(path):
                    self._add(place, files)
            except (OSError, SourceError, Unreadable) as error:
                if not any(run.path == path for run in self.runs):
                    self.missing[given] = _why(error)
        took = time.monotonic() - began
        self._next = time.monotonic() + max(_SEARCH if self.runs else 0.5, _SHARE * took)

    def _add(self, place: Path, files: list[Path]) -> None:
        new = [file for file in files if file not in self._known]
        self._known.update(new)
        known = next((run for run in self.runs if run.path == place), None)
        if known is not None:
            known.files += [_Followed(Tail(file)) for file in new]
        elif new and len(self.runs) >= MOST_RUNS:
            self.left_out += 1
        elif new:
            state = RunState(literal(_name(place, self.wanted.paths), 200), self.wanted.total)
            followed = [_Followed(Tail(file)) for file in new]
            self.runs.append(Watched(place, state, followed, self.wanted))


def _runs_at(path: Path) -> Iterator[tuple[Path, list[Path]]]:
    """Yields the runs of a path, those first that were written to last."""
    if not path.is_dir():
        with path.open("rb") if path.is_file() else _no_file(path) as file:
            refuse_binary(path.name, file.read(HEAD))
        beside = path.with_name(EVENTS)
        own = path.name == METRICS and beside.is_file()
        yield path, [path, beside] if own else [path]
        return
    found = [run for run in find_runs([path]) if run.has_numbers]
    if not found:
        raise SourceError("there is no log here", where=str(path), do="Give a log.")
    files = [(run.path, [*run.logs, *([run.events] if run.events else [])]) for run in found]
    yield from sorted(files, key=lambda run: -_written(run[1]))


def _no_file(path: Path) -> BinaryIO:
    path.stat()
    raise SourceError("it is no regular file", where=str(path), do="Give a log.")


def _written(files: Sequence[Path]) -> float:
    return max((file.stat().st_mtime for file in files if file.exists()), default=0.0)


def _name(place: Path, given: Sequence[str]) -> str:
    if len(given) == 1 and Path(given[0]).is_dir() and place != Path(given[0]):
        return str(place.relative_to(given[0]))
    return str(place)


def _why(error: OSError | SourceError | Unreadable) -> str:
    if isinstance(error, SourceError):
        return error.what.rstrip(".")
    if isinstance(error, Unreadable):
        return str(error)
    if isinstance(error, FileNotFoundError):
        return "there is no such file or folder"
    return f"it cannot be read ({error.strerror or error})"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
