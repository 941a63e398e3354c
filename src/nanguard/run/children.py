"""The processes below a command: none may outlive it when it is to be started again.

A worker that lives on holds the port and the device that the next attempt needs, and writes
checkpoints of its own. Process groups do not tell which these are: launchers give their workers
sessions of their own. So orphans are adopted, which makes them findable.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanguard.run.control import ATTACHED, processes

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterable

_PR_SET_CHILD_SUBREAPER = 36
# Seconds that a process has between being asked to end and being ended.
PATIENCE = 5.0


def adopt_orphans() -> None:
    """Makes whatever loses its parent below this process a child of this process."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def wait_for(process: subprocess.Popen[Any]) -> int:
    """Waits until a command ends, and buries adopted children meanwhile; returns its code."""
    # Where Python cannot wait for whichever ends first, nothing was adopted either.
    while hasattr(os, "waitid") and process.poll() is None:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        if ended is not None and ended.si_pid != process.pid:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(ended.si_pid, 0)
    return process.wait()


def end_guarded(control: Path) -> int:
    """Ends the guarded processes of a run that still live; returns how many there were.

    Copies of them that explain an incident are left to finish.
    """
    return _end({pid for pid in processes(control, ATTACHED) if _belongs(pid, control)})


def end_descendants() -> int:
    """Ends everything below this process; returns how many processes there were."""
    return _end(set(descendants()))


def descendants() -> list[int]:
    """Returns the processes below this one that live, as far as the system shows them."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        about = _status(int(entry.name))
        if about is not None:
            parents[int(entry.name)] = about
    below: set[int] = {os.getpid()}
    grown = True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in below} - below
        below |= more
        grown = bool(more)
    return sorted(below - {os.getpid()})


def _end(pids: set[int]) -> int:
    living = {pid for pid in pids if _lives(pid)}
    if not living:
        return 0
    _signal(living, signal.SIGTERM)
    left = _gone(living, PATIENCE)
    _signal(left, signal.SIGKILL)
    _gone(left, PATIENCE)
    return len(living)


def _gone(pids: set[int], seconds: float) -> set[int]:
    """Waits until processes are gone; returns those that are not."""
    end = time.monotonic() + seconds
    left = {pid for pid in pids if _lives(pid)}
    while left and time.monotonic() < end:
        time.sleep(0.02)
        left = {pid for pid in left if _lives(pid)}
    return left


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def _lives(pid: int) -> bool:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)  # one that we have adopted, and that is over, is buried
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return _status(pid) is not None or sys.platform != "linux"


def _status(pid: int) -> int | None:
    """Returns the parent of a process; None if there is no such process, or it is over."""
    try:
        content = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name of the program stands in brackets and may hold anything, half a character too.
    state, parent = content.rpartition(b")")[2].split()[:2]
    return None if state in b"ZX" else int(parent)


def _belongs(pid: int, control: Path) -> bool:
    """Returns whether a process is one of a run, and not another that has got its number."""
    try:
        return str(control).encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return sys.platform != "linux"
