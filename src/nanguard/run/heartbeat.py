"""What a guarded process leaves behind for whoever restarts it: its steps, and how it ended.

The steps are counted in a file that is mapped into memory, so they are known whatever ends the
process, ``kill -9`` included. Beside the count stands the time of each of the last steps, which
tells how many of them came after a checkpoint was written.
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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanguard.masking import hidden_tree
from nanguard.run.control import BAD, ENDED, RAISED, RATE, STEPS

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

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
