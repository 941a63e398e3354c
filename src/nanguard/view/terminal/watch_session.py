"""The runs that are watched: finding and following them, until somebody says that it is enough."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from nanguard.alerts import COMMAND_LIMIT, LIMIT, Alert
from nanguard.errors import SourceError, UsageError
from nanguard.record import EVENTS, METRICS
from nanguard.view.report.words import literal
from nanguard.view.runs import find_runs
from nanguard.view.terminal.tail import LineReader, Tail, WholeLogs, is_in_lines, progress_in
from nanguard.view.terminal.view import happening_text, numbers, progress, state_of
from nanguard.view.terminal.watch_state import RunState

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nanguard.alerts import Alerts
    from nanguard.view.terminal.view import Screen, View
    from nanguard.view.terminal.watch_state import Happening

# Bytes of one run that are read before the view is drawn again, and seconds that it may take.
_BUDGET, _BUDGET_SECONDS = 4 << 20, 0.5
# A run has stalled when it is silent for at least these seconds, for this many times the usual time
# between two lines, and for this many times the longest pause it made before.
_PATIENCE, _USUAL, _PAUSES = 120.0, 20.0, 3.0
# Pauses between lines that have to be known before one can be too long.
_FEWEST_GAPS = 5
# Seconds without a line after which a run that said so, or made its last step, has ended.
_QUIET, _QUIET_AFTER_LAST = 5.0, 60.0
# Numbers are judged again after a pause of this many times what judging took: 5 % of the time.
_JUDGING_PAUSE = 20.0
# Runs that are watched at once; more do not fit on a screen.
MOST_RUNS = 16
# Seconds between two searches for new runs, and how many times as long as a search they are.
_SEARCH, _SHARE = 5.0, 50.0


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
        """Reads what is new; returns what is to be reported."""
        happenings: list[Happening] = []
        more = False
        grew = self._read_whole(happenings)
        for one in self.files:
            more_of_it, new, grew_here = self._follow(one)
            happenings += new
            more, grew = more or more_of_it, grew or grew_here
        if grew:
            self._note_growth()
        if not more and self.reading:
            happenings += self._judge(old=not self.wanted.once)
            self.reading = False
            happenings += self._still_bad()
        elif self.state.urgent or time.monotonic() >= self._next:
            happenings += self._judge(old=self.reading and not self.wanted.once)
        return happenings + self._see_whether_stalled()

    def finish(self) -> list[Happening]:
        """Reads last lines that have no end; returns what is to be reported."""
        happenings: list[Happening] = []
        for one in self.files:
            left = one.tail.rest()
            if left and one.reader is not None:
                happenings += self.state.take(one.reader.read(left, ended=False), old=False)
        return happenings + self._judge(old=False)

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
        self.whole.close()

    def _read_whole(self, happenings: list[Happening]) -> bool:
        """Reads files that have changed from their beginning; returns whether any has."""
        logs = self.whole.look()
        for log in logs:
            happenings += self.state.take_whole(log, old=self.reading and not self.wanted.once)
        if logs and self.wanted.once:
            self.state.count_to(*progress_in(self.whole.last_words()))
        return bool(logs)

    def _judge(self, *, old: bool) -> list[Happening]:
        if not self.state.unjudged:
            return []
        began = time.monotonic()
        happenings = self.state.judge(old=old)
        self._next = time.monotonic() + _JUDGING_PAUSE * (time.monotonic() - began)
        return happenings

    def _follow(self, one: FollowedFile) -> tuple[bool, list[Happening], bool]:
        happenings: list[Happening] = []
        done, late = 0, time.monotonic() + _BUDGET_SECONDS
        while True:
            piece = one.tail.look()
            for news in piece.news:
                happenings += self._report_news(one, news)
            done += len(piece.text)
            if piece.text:
                if one.reader is None:
                    one.reader = LineReader(one.tail.path, one.tail.head())
                old = one.tail.offset <= one.tail.old
                if not old and self.reading:
                    # What stood there before is judged before anything new is added to it.
                    happenings += self._judge(old=True)
                happenings += self.state.take(one.reader.read(piece.text), old=old)
            if not piece.more or done > _BUDGET or time.monotonic() > late:
                return piece.more, happenings, done > 0

    def _report_news(self, one: FollowedFile, news: str) -> list[Happening]:
        name = literal(one.tail.path.name, 80)
        if news == "deleted":
            return self.state.report("deleted", f"{name} was deleted; it is followed if it returns")
        one.reader = None
        if news == "opened":
            if not one.tail.skipped:
                return []
            return self.state.report("long", f"only the last 64 MiB of {name} are read")
        said = {"truncated": "was emptied", "rotated": "was replaced"}.get(news, "is there again")
        return self.state.report(
            news, f"{name} {said}; what is new in it is read from its beginning"
        )

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
        return self.state.report("non-finite-loss", f"{bad}, since before the watch", alarm=True)

    def _see_whether_stalled(self) -> list[Happening]:
        limit = self._limit()
        since = time.monotonic() - (self.state.grown or self._began)
        if self.stalled or self.reading or limit is None or since < limit or self.ended():
            return []
        self.stalled = True
        usual = f"; {median(self._gaps):.1f} s are usual" if self._gaps else ""
        return self.state.report("stalled", f"nothing new for {since:.0f} s{usual}", alarm=True)

    def _limit(self) -> float | None:
        if self.wanted.once or self.wanted.stall == 0:
            return None
        if self.wanted.stall is not None:
            return self.wanted.stall
        if len(self._gaps) < _FEWEST_GAPS:
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
        """Reads what is new everywhere; returns what is to be reported."""
        if not self.wanted.once and time.monotonic() >= self._next:
            self._search()
        return [(run, one) for run in self.runs for one in run.look()]

    def finish(self) -> list[tuple[WatchedRun, Happening]]:
        """Reads last lines that have no end; returns what is to be reported."""
        return [(run, one) for run in self.runs for one in run.finish()]

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


# Seconds between two looks at the files, which are also two frames; less is too much for ssh.
EVERY = 0.5
# Seconds between two looks when nothing has changed for the seconds that follow.
_IDLE, _IDLE_AFTER = 1.0, 30.0


@dataclass(slots=True)
class Watching:
    """Looks at runs again and again.

    Attributes:
        session: The runs.
        alerts: Where alarms are sent; None for nowhere.
        bell: Whether the terminal rings on an alarm.
        until_alarm: Whether the first alarm ends it.
        every: Seconds between two plain lines about a run.
        alarmed: Whether there was an alarm.
    """

    session: Session
    alerts: Alerts | None = None
    bell: bool = False
    until_alarm: bool = False
    every: float = 10.0
    alarmed: bool = False
    _changed: float = field(default_factory=time.monotonic)
    _lines: dict[int, tuple[float, int]] = field(default_factory=dict)

    def once(self) -> None:
        """Reads what is there."""
        self._look()
        while self.session.reading:
            self._look()
        self._last_words()

    def in_view(self, screen: Screen, view: View) -> None:
        """Shows runs until a key, Ctrl-C or, if wanted, an alarm or the end."""
        gpus = Gpus()
        following = True
        while following:
            for run, happening in self._look():
                if happening.alarm and not happening.old:
                    view.chosen = self.session.runs.index(run)
                    if self.bell:
                        screen.bell()
            view.gpus = gpus.lines()
            over = self._is_over()
            if over:
                self._last_words()
            screen.show(view.frame(self.session, *screen.size()))
            following = not over and self._keys(screen.wait(self._pause()), view)

    def in_lines(self) -> None:
        """Prints lines until Ctrl-C or, if wanted, an alarm or the end."""
        while True:
            self.print_news(self._look())
            if self._is_over():
                self.print_news(self._last_words())
                return
            time.sleep(self._pause())

    def print_news(self, news: list[tuple[WatchedRun, Happening]], *, last: bool = False) -> None:
        """Prints what happened, and now and then how the runs are doing."""
        out: list[str] = []
        for run, happening in news:
            mark = (
                "ALARM"
                if happening.alarm and not happening.old
                else "alarm"
                if happening.alarm
                else "event"
            )
            out.append(f"{_clock()}  {mark}  {run.state.name}  {happening_text(happening)}")
            if self.bell and happening.alarm and not happening.old and sys.stdout.isatty():
                out[-1] += "\a"
        for place, run in enumerate(self.session.runs):
            then, lines = self._lines.get(place, (0.0, -1))
            due = time.monotonic() - then >= self.every and lines != run.state.lines
            if last or (due and not run.reading):
                self._lines[place] = (time.monotonic(), run.state.lines)
                out.append(f"{_clock()}  {_status(run)}")
        if out:
            sys.stdout.write("\n".join(out) + "\n")
            sys.stdout.flush()

    def finish(self) -> list[str]:
        """Waits for alerts that are on their way; returns what went wrong with them."""
        self.session.close()
        return self.alerts.close(COMMAND_LIMIT + LIMIT) if self.alerts else []

    def _look(self) -> list[tuple[WatchedRun, Happening]]:
        news = self.session.look()
        for run, happening in news:
            self._react(run, happening)
        if self.alerts and self.session.runs:
            for problem in self.alerts.problems():
                run = self.session.runs[0]
                news += [(run, happening) for happening in run.state.report("alert", problem)]
        if news or any(run.state.grown for run in self.session.runs):
            grown = max((run.state.grown or 0.0 for run in self.session.runs), default=0.0)
            self._changed = max(self._changed, grown)
        return news

    def _react(self, run: WatchedRun, happening: Happening) -> None:
        if not happening.alarm or happening.old:
            return
        self.alarmed = True
        if self.alerts is not None:
            alert = Alert(
                happening.kind,
                happening.text,
                str(run.path),
                step=happening.step,
                value=happening.value,
            )
            self.alerts.send(alert)

    def _is_over(self) -> bool:
        if self.until_alarm and self.alarmed:
            return True
        asked = self.until_alarm or self.session.wanted.pid is not None
        return asked and self.session.ended()

    def _last_words(self) -> list[tuple[WatchedRun, Happening]]:
        """Reads what came between the last look and the end, and lines that have no end."""
        news, last = self._look(), self.session.finish()
        for run, happening in last:
            self._react(run, happening)
        return news + last

    def _pause(self) -> float:
        if self.session.reading:
            return 0.0
        return _IDLE if time.monotonic() - self._changed > _IDLE_AFTER else EVERY

    def _keys(self, keys: str, view: View) -> bool:
        """Does what keys ask for; returns whether the view goes on."""
        if "q" in keys or "\x03" in keys:
            return False
        if "l" in keys:
            view.log = {None: True, True: False, False: None}[view.log]
        if "\t" in keys or "\x1b[B" in keys or "j" in keys:
            view.chosen += 1
        if "\x1b[A" in keys or "\x1b[Z" in keys or "k" in keys:
            view.chosen -= 1
        return True


def _status(run: WatchedRun) -> str:
    state, _ = state_of(run)
    where, share, speed = progress(run.state)
    if run.wanted.once:
        # What was read at once tells nothing about the speed of the run.
        alarms, speed = run.state.alarms, ""
        state = f"{alarms} alarm{'' if alarms == 1 else 's'}" if alarms else "no alarm"
    done = "" if share is None else f"{share:.1%}"
    parts = [run.state.name, where, done, *numbers(run.state), speed, state]
    return "  ".join(part for part in parts if part)


def _clock() -> str:
    return time.strftime("%H:%M:%S")


# Seconds between two looks; a look takes some time of the driver.
_EVERY = 2.0
# GPUs that are listed.
_MOST_GPUS = 16
_GIB = float(1 << 30)


class Gpus:
    """The GPUs of this machine; none where NVML is not installed or finds no driver."""

    def __init__(self) -> None:
        self._nvml = _nvml()
        self._next = 0.0
        self._lines: list[str] = []

    def lines(self) -> list[str]:
        """Returns a line for each GPU."""
        if self._nvml is not None and time.monotonic() >= self._next:
            self._next = time.monotonic() + _EVERY
            self._lines = self._look(self._nvml)
        return self._lines

    def _look(self, nvml: Any) -> list[str]:
        lines: list[str] = []
        try:
            for index in range(min(_MOST_GPUS, nvml.nvmlDeviceGetCount())):
                device = nvml.nvmlDeviceGetHandleByIndex(index)
                memory = nvml.nvmlDeviceGetMemoryInfo(device)
                load = nvml.nvmlDeviceGetUtilizationRates(device).gpu
                used, total = memory.used / _GIB, memory.total / _GIB
                lines.append(f"GPU {index}  {used:.1f} of {total:.0f} GiB  {load} %")
        except nvml.NVMLError:
            return lines
        return lines


def _nvml() -> Any:
    try:
        pynvml = import_module("pynvml")
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml
