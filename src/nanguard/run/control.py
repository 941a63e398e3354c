"""How ``nanguard run`` and the processes below it talk: its options, and the notes they leave.

Options travel in an environment variable. Notes are files in the control folder, named here and
nowhere else; behind each name stands the number of the process that has left it. Among them are
heartbeats: how far a process has come and how it ended, for whoever starts it again.
"""

from __future__ import annotations

import contextlib
import json
import linecache
import mmap
import os
import struct
import sys
import time
from bisect import bisect_right
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from nanguard.diagnose.lab import TRYING as TRYING
from nanguard.masking import hidden, hidden_tree

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

VARIABLE = "NANGUARD_RUN"
HOME = "NANGUARD_HOME"


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The options of one ``nanguard run``.

    Attributes:
        incidents: The folder for incidents.
        run_dir: The folder for the record of the run; None to keep none.
        control: A folder through which the processes tell the launcher what happened.
        command: The command.
        folder: Where it was started.
        signature: Says that it was this user who started it.
        on_bad: What to do about a bad step: skip, rollback or stop.
        max_bad: How many bad steps the run may meet; None for no such bound.
        spikes: What to do about a loss or gradient norm far above the usual: act, warn or off.
        trace: Whether a bad step is replayed and explained.
        quiet: Whether only the end of a run is worth a line.
        patience: How many seconds a second run that only replays a step may take.
        explain_seconds: How many seconds the explanation of one incident may take; None for as
            many as ``nanguard.diagnose.lab`` allows.
        again: What a second run of the command is for; None for the first.
        recover: Whether somebody is there to start the command again.
        track: Where else the run is written to.
        quarantine: Whether loaders leave out samples that were found bad.
        left_out: The samples that were known when the run began, as (data set, length, index);
            None for those that are listed on disk.
    """

    incidents: str
    control: str
    command: tuple[str, ...]
    folder: str
    run_dir: str | None = None
    signature: str | None = None
    on_bad: str = "skip"
    max_bad: int | None = None
    spikes: str = "warn"
    trace: bool = True
    quiet: bool = False
    patience: float = 90.0
    explain_seconds: float | None = None
    again: dict[str, Any] | None = None
    recover: bool = False
    track: tuple[str, ...] = ()
    quarantine: bool = False
    left_out: tuple[tuple[str, int, int], ...] | None = None

    def to_text(self) -> str:
        """Returns the options as the environment variable holds them."""
        return json.dumps(asdict(self))


def from_environment() -> Options | None:
    """Returns the options of the run this process belongs to; None outside of one."""
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    try:
        values = json.loads(text)
        tuples = {name: tuple(values[name]) for name in ("command", "track")}
        # The process may have another version of nanguard than the launcher.
        known = {field.name for field in fields(Options)}
        return Options(**{name: values[name] for name in values if name in known} | tuples)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


# Nanguard is in this process, which is about to import torch, if it is not just looking for it.
# Written by attach.py, read by unguarded.py. Empty.
REACHED = "reached-"
# Torch was imported, and this process is guarded from here on. A process that only starts others
# leaves none. Written by incident_writer.py. Empty.
ATTACHED = "attached-"
# The process has made its first step, or its first backward where there is no optimizer. Written
# by live.py, also for a script with a Guard of its own. Empty.
STEPPED = "stepped-"
# This process uses torch, and nanguard could not get into it. Written by unguarded.py, in the
# launcher. Empty.
UNGUARDED = "unguarded-"
# The guard has ended the run. Written by incident_writer.py. The reason.
STOPPED = "stopped-"

# TRYING ("trying-"): a replay of an explanation has begun, in a second run. Named after the
# incident's folder. Written by diagnose/session.py for each replay. JSON: until when it may go on.

# The notes of a run that may be recovered; heartbeat.py writes them and says what they hold.
STEPS = "steps-"
ENDED = "ended-"
RAISED = "raised-"
RATE = "rate-"
BAD = "bad-"

# The user, or the system, wants the run to end. Written by command.py. Empty, with no number.
INTERRUPTED = "interrupted"


def leave(control: Path, name: str, text: str = "") -> None:
    """Leaves a note; a folder that is gone or full must not end the run."""
    with contextlib.suppress(OSError):
        (control / name).write_text(hidden(text))


def processes(control: Path, kind: str) -> set[int]:
    """Returns the processes that have left a kind of note."""
    numbers = (path.name.removeprefix(kind) for path in control.glob(f"{kind}*"))
    return {int(number) for number in numbers if number.isdecimal()}


# The steps whose times are kept.
_KEPT = 1 << 17
_HEADER = 8
# The clock that file systems stamp files with, which ticks a few milliseconds behind the finer one.
_COARSE = 5
_LONGEST = 2000
# Bytes of the numbers of bad steps that are read, from the last one back.
_MOST = 1 << 16


class Heartbeat:
    """Counts the steps of this process where others can read them.

    Attributes:
        control: The folder of the run.
    """

    def __init__(self, control: Path) -> None:
        self.control = control
        self._steps = 0
        self._pid = 0
        self._map: mmap.mmap | None = None

    def beat(self, steps: int) -> None:
        """Notes how many steps were tried."""
        if self._pid != os.getpid():
            self._open()
        if self._map is None or steps <= self._steps:
            return
        self._steps = steps
        at = _HEADER + 8 * ((steps - 1) % _KEPT)
        # Files are stamped by a clock that lags behind this one by a few milliseconds. So a
        # step may be taken for one after a checkpoint, and none for one before it that was not.
        struct.pack_into("<d", self._map, at, time.time())
        struct.pack_into("<Q", self._map, 0, steps)

    def _open(self) -> None:
        self._pid, self._steps, self._map = os.getpid(), 0, None
        # A full disk or a folder that is gone must not end the run.
        with contextlib.suppress(OSError, ValueError):
            path = self.control / f"{STEPS}{self._pid}"
            with path.open("w+b") as file:
                # A hole that a full disk cannot fill would end the process when it is written to.
                file.write(bytes(_HEADER + 8 * _KEPT))
                file.flush()
                self._map = mmap.mmap(file.fileno(), 0)

    def bad(self, step: int) -> None:
        """Notes a bad step, counted from 0 as by ``beat``."""
        with contextlib.suppress(OSError), self._note(BAD).open("a") as file:
            file.write(f"{step}\n")

    def rate(self, lr: float | None) -> None:
        """Notes the learning rate that this process has made its first step with, if it has one."""
        if lr is not None:
            self._leave(RATE, {"lr": lr})

    def listen(self) -> None:
        """Hears of the exception that ends this process, if one does."""
        before = sys.excepthook

        def hook(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
            with contextlib.suppress(Exception):
                self._leave(RAISED, _told(kind, error, trace))
            before(kind, error, trace)

        sys.excepthook = hook

    def end(self, *, finite: bool) -> None:
        """Notes that this process came to its end by itself, and what its state was then."""
        self._leave(ENDED, {"finite": finite})

    def _leave(self, name: str, facts: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self._note(name).write_text(json.dumps(hidden_tree(facts)))

    def _note(self, name: str) -> Path:
        return self.control / f"{name}{os.getpid()}"


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of a process, as it left them behind.

    Attributes:
        pid: The process.
        count: How many were tried.
        times: When each of the last ones was over, oldest first.
    """

    pid: int
    count: int
    times: tuple[float, ...]

    def until(self, moment: float) -> int | None:
        """Returns how many steps were over at a time; None if that is too long ago to know."""
        after = len(self.times) - bisect_right(self.times, moment)
        if after == len(self.times) < self.count:
            return None
        return self.count - after


def read_steps(path: Path) -> Steps | None:
    """Reads the steps that a process left behind; None if it left nothing that can be read."""
    try:
        content = path.read_bytes()
        pid = int(path.name.removeprefix(STEPS))
        (count,) = struct.unpack_from("<Q", content, 0)
        kept = min(count, _KEPT)
        ring = struct.unpack_from(f"<{_KEPT}d", content, _HEADER)
    except (OSError, ValueError, struct.error):
        return None
    return Steps(pid, count, tuple(ring[at % _KEPT] for at in range(count - kept, count)))


def read_bad(path: Path) -> list[int]:
    """Reads the bad steps that a process has noted; of very many the last ones."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _MOST))
            whole = file.tell() == 0
            lines = file.read(_MOST).split(b"\n")
    except OSError:
        return []
    return [int(line) for line in lines[0 if whole else 1 :] if line.isdigit()]


def now_as_files_have_it() -> float:
    """Returns the time as a file that is written now will be stamped with."""
    try:
        return time.clock_gettime(_COARSE)
    except (OSError, AttributeError):  # another system than Linux
        return time.time()


def _told(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> dict[str, Any]:
    last = trace
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    file, line = ("", 0) if last is None else (last.tb_frame.f_code.co_filename, last.tb_lineno)
    return {
        "type": kind.__name__,
        "message": str(error)[:_LONGEST],
        "file": file,
        "line": line,
        "code": linecache.getline(file, line).strip()[:_LONGEST],
    }
