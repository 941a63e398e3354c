"""The runs that are watched: where they are, and which come later."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from nanguard.errors import SourceError, UsageError
from nanguard.record import EVENTS, METRICS
from nanguard.view.report.fields import literal
from nanguard.view.runs import find_runs
from nanguard.view.terminal.reading import is_in_lines
from nanguard.view.terminal.tail import Tail
from nanguard.view.terminal.watch_state import RunState
from nanguard.view.terminal.watched import FollowedFile, WatchedRun

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nanguard.view.terminal.channels import Happening
    from nanguard.view.terminal.watched import Wanted

MOST_RUNS = 16
# Seconds between two searches for new runs, and how many times as long as a search they are.
_SEARCH, _SHARE = 5.0, 50.0


class Session:
    """All runs that are watched.

    Attributes:
        runs: The runs, in the order in which they were found.
        left_out: How many runs there are beyond those that are watched.
        missing: What is waited for, and why it cannot be read.
    """

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.runs: list[WatchedRun] = []
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

    def look(self) -> list[tuple[WatchedRun, Happening]]:
        """Reads what is new everywhere; returns what is to be told."""
        if not self.wanted.once and time.monotonic() >= self._next:
            self._search()
        return [(run, told) for run in self.runs for told in run.look()]

    def finish(self) -> list[tuple[WatchedRun, Happening]]:
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
                for place, files in _runs_at(path, once=self.wanted.once):
                    self._add(place, files)
            except (OSError, SourceError) as error:
                if not any(run.path == path for run in self.runs):
                    self.missing[given] = _why(error)
        took = time.monotonic() - began
        self._next = time.monotonic() + max(_SEARCH if self.runs else 0.5, _SHARE * took)

    def _add(self, place: Path, files: list[Path]) -> None:
        new = [file for file in files if file not in self._known]
        self._known.update(new)
        run = next((run for run in self.runs if run.path == place), None)
        if run is None and new and len(self.runs) >= MOST_RUNS:
            self.left_out += 1
        elif run is None and new:
            state = RunState(literal(_name(place, self.wanted.paths), 200), self.wanted.total)
            run = WatchedRun(place, state, [], self.wanted)
            self.runs.append(run)
        if run is not None:
            lines = [file for file in new if is_in_lines(file)]
            once = self.wanted.once
            # What the guard did is listed in any case, beside what the rules say about it.
            followed = [file for file in lines if file.name == EVENTS] if once else lines
            run.files += [FollowedFile(Tail(file)) for file in followed]
            run.whole.paths += [file for file in new if once or file not in lines]


def _runs_at(path: Path, *, once: bool) -> Iterator[tuple[Path, list[Path]]]:
    """Yields the runs of a path, those first that were written to last."""
    if not path.is_dir():
        if not path.is_file():
            path.stat()
            raise SourceError("it is no regular file", where=str(path), do="Give a log.")
        beside = path.with_name(EVENTS)
        own = path.name == METRICS and beside.is_file() and not once
        yield path, [path, beside] if own else [path]
        return
    found = [run for run in find_runs([path]) if run.has_numbers]
    if not found:
        raise SourceError("there is no log here", where=str(path), do="Give a log.")
    files = [(run.path, [*run.logs, *([run.events] if run.events else [])]) for run in found]
    yield from sorted(files, key=lambda run: -_written(run[1]))


def _written(files: Sequence[Path]) -> float:
    return max((file.stat().st_mtime for file in files if file.exists()), default=0.0)


def _name(place: Path, given: Sequence[str]) -> str:
    if len(given) == 1 and Path(given[0]).is_dir() and place != Path(given[0]):
        return str(place.relative_to(given[0]))
    return str(place)


def _why(error: OSError | SourceError) -> str:
    if isinstance(error, SourceError):
        return error.what.rstrip(".")
    if isinstance(error, FileNotFoundError):
        return "there is no such file or folder"
    return f"it cannot be read ({error.strerror or error})"
