"""Moments of the past that a run can go back to: forked processes that wait.

A forked process is a complete copy of a run on a CPU: variables, iterators, random streams, all
of it. It costs a few milliseconds and the memory of what changes afterwards. It waits until it is
woken or the run ends. When it is woken, it forks again, as often as needed, and each of these
goes on from that moment, with something changed.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
import random
import shutil
import signal
import tempfile
import time
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanguard.launch.sandbox import OpenFiles, Shadow

if TYPE_CHECKING:
    from collections.abc import Callable

# The share of a run's time that may go into taking moments, as far as it is counted: what copied
# pages cost the steps after the next one is not.
_SHARE = 0.003
# What a fork costs at first, for each byte of the run: pages are copied when they are written to.
_SECONDS_PER_BYTE = 0.7e-9
# Steps between two looks at how much memory the run has.
_SELDOM = 64
# What must be free, as a multiple of the memory of the run.
_ROOM = 1.5
_HARD = 2


@dataclass
class Moment:
    """A process that waits at some point of the run.

    Attributes:
        ordinal: How many steps the run had made.
        line: The way to wake it.
    """

    ordinal: int
    line: Connection


class Timeline:
    """Takes moments, keeps few of them, and wakes them.

    Args:
        serve: What a woken process does with the message, and with a function that forks.
    """

    def __init__(self, serve: Callable[[Any, Fork], None]) -> None:
        self._serve = serve
        self.first: Moment | None = None
        self.recent: list[Moment] = []
        self._spent = 0.0
        self._began = time.monotonic()
        self._last_cost = 0.0
        self._asked = 0
        # What a step takes that does not follow a fork, and when this one began.
        self._usual = 0.0
        self._began_step = self._began
        self._forked = False
        # Whoever the script forks must not keep our moments waiting after its end.
        os.register_at_fork(after_in_child=self._close_lines)
        self._pid = os.getpid()

    @property
    def elapsed(self) -> float:
        """Seconds since the first moment was, or could have been, taken."""
        return time.monotonic() - self._began

    def take_first(self) -> Any:
        """Takes the moment before anything happened; returns a task in a process that replays."""
        moment, task = self._take(0)
        self.first = moment
        return task

    def take_if_due(self, ordinal: int) -> Any:
        """Takes a moment if that is cheap enough; returns a task in a process that replays."""
        self._count_cost()
        self._asked += 1
        if self.first is not None and not self.recent and self._asked % _SELDOM == 1:
            # There is no hurry, so the first one is not taken before it is paid for.
            self._last_cost = max(self._last_cost, _SECONDS_PER_BYTE * _memory())
        if self._spent + self._last_cost > _SHARE * self.elapsed or not _has_room():
            return None
        moment, task = self._take(ordinal)
        self._began_step, self._forked = time.monotonic(), True
        if task is not None:
            return task
        if moment is not None:
            self.recent.append(moment)
        while len(self.recent) > 2:
            self._let_go(self.recent.pop(0))
        return None

    def _count_cost(self) -> None:
        """Counts what the last moment cost the step after it, which copies what it writes to."""
        now = time.monotonic()
        took, self._began_step = now - self._began_step, now
        if self._forked:
            self._forked = False
            excess = max(0.0, took - self._usual) if self._usual else took
            self._last_cost += excess
            self._spent += excess
        else:
            self._usual = took if not self._usual else 0.9 * self._usual + 0.1 * took

    def best(self, ordinal: int, *, patience: float) -> Moment | None:
        """Returns the moment a replay of a step is to start from.

        The very first one shows the most, if it is not too long ago. Otherwise the last one.
        """
        if self.first is not None and self.elapsed < patience / 15:
            return self.first
        recent = [moment for moment in self.recent if moment.ordinal <= ordinal]
        if recent:
            return recent[-1]
        return self.first if self.elapsed < patience / 3 else None

    def wake(self, moment: Moment, message: Any) -> bool:
        """Wakes a moment; returns whether it could hear."""
        try:
            moment.line.send(message)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Lets go of every moment."""
        for moment in [*self.recent, *([self.first] if self.first else [])]:
            self._let_go(moment)
        self.recent, self.first = [], None

    def _take(self, ordinal: int) -> tuple[Moment | None, Any]:
        start = time.monotonic()
        _pause_threads()
        reader, writer = os.pipe()
        try:
            waits = _fork_away()
        except OSError:
            os.close(reader)
            os.close(writer)
            return None, None
        if waits:
            os.close(writer)
            return None, self._wait(Connection(reader, writable=False))
        os.close(reader)
        self._last_cost = time.monotonic() - start
        self._spent += self._last_cost
        return Moment(ordinal, Connection(writer, readable=False)), None

    def _wait(self, line: Connection) -> Any:
        """Waits to be woken; returns a task in a process that is to go on from here."""
        # Whatever is sent to the run is not meant for a copy of its past.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        gc.disable()
        # The other ends of pipes and sockets must not wait for this process.
        OpenFiles([line.fileno()]).detach()
        while True:
            try:
                message = line.recv()
            except (EOFError, OSError):
                os._exit(0)
            if _fork_away():
                break
        line.close()
        return _served(self._serve, message)

    def _let_go(self, moment: Moment) -> None:
        moment.line.close()

    def _close_lines(self) -> None:
        for moment in [*self.recent, *([self.first] if self.first else [])]:
            with contextlib.suppress(OSError):
                moment.line.close()
        self.recent, self.first = [], None


def serve_here(serve: Callable[[Any, Fork], None], message: Any) -> Any:
    """Makes this process serve, as a woken one does; returns a task in one that is to go on."""
    OpenFiles([]).detach()
    return _served(serve, message)


def _served(serve: Callable[[Any, Fork], None], message: Any) -> Any:
    task: Any = None
    try:
        serve(message, Fork())
    except _ReplayError as replay:
        task = replay.task
    finally:
        if task is None:
            os._exit(0)
    return task


class _ReplayError(BaseException):
    """Carries a task up to where the process was forked, in a process that is to go on there."""

    def __init__(self, task: Any) -> None:
        super().__init__()
        self.task = task


class Fork:
    """Starts copies of a waiting process that go on from its moment."""

    def run(self, task: Any, seconds: float) -> Any:
        """Lets a copy of this process go on with a task; returns what it answers.

        Returns None if it does not answer in time, or ends without an answer.
        """
        reader, writer = os.pipe()
        folder = tempfile.mkdtemp(prefix="nanguard-replay-")
        pid = _fork()
        if pid == 0:
            os.close(reader)
            task.answer = Connection(writer, readable=False)
            Shadow(Path(folder)).put_on()
            raise _ReplayError(task)
        os.close(writer)
        line = Connection(reader, writable=False)
        answer: Any = None
        try:
            if wait([line], seconds):
                answer = line.recv()
        except (EOFError, OSError):
            answer = None
        finally:
            line.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
            shutil.rmtree(folder, ignore_errors=True)
        return answer


def _fork_away() -> bool:
    """Makes a copy of this process that is nobody's child; returns whether this is the copy.

    A child would be seen by a script that waits for any child of its own.
    """
    # The end of the process in between is not the script's business either.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    pid = _fork()
    if pid == 0:
        try:
            if _fork() != 0:
                os._exit(0)
        except OSError:
            os._exit(1)
        return True
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
    if signal.SIGCHLD not in before:
        signal.sigtimedwait([signal.SIGCHLD], 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return False


def _fork() -> int:
    # Python gives every forked process another seed, and a copy must not have one.
    state = random.getstate()
    with warnings.catch_warnings():
        # Threads do not survive a fork, which is known here; a copy has a time limit.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        random.setstate(state)
    return pid


def _memory() -> int:
    """Returns how many bytes of memory this process has."""
    try:
        with open("/proc/self/statm") as info:  # noqa: PTH123 - the way to read it
            return int(info.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def _has_room() -> bool:
    """Returns whether a copy of this process would fit into memory, if all of it changed."""
    try:
        with open("/proc/meminfo") as info:  # noqa: PTH123
            free = next(int(line.split()[1]) for line in info if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return False
    return min(free * 1024, _left_in_cgroup()) > _ROOM * _memory()


def _left_in_cgroup() -> float:
    """Returns how much memory a container still has, if there is a limit."""
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        return math.inf if limit == "max" else int(limit) - used
    except (OSError, ValueError):
        return math.inf


_openmp: list[Any] = []


def _pause_threads() -> None:
    """Ends the threads of OpenMP, which makes them anew when needed: they do not survive a fork."""
    if not _openmp:
        _openmp.extend(_find_openmp())
    for library in _openmp:
        library.omp_pause_resource_all(_HARD)


def _find_openmp() -> list[Any]:
    found = []
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:  # noqa: PTH123
        paths = {line.split()[-1] for line in maps if "omp" in line and ".so" in line}
        for path in paths:
            with contextlib.suppress(OSError, AttributeError):
                library = ctypes.CDLL(path)
                library.omp_pause_resource_all.restype = ctypes.c_int
                found.append(library)
    return found
