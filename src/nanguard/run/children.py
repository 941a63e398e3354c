"""The processes below a command: none may outlive it when it is to be started again.

A worker that lives on holds the port and the device that the next attempt needs, and writes
checkpoints of its own. Process groups do not tell which these are: launchers give their workers
sessions of their own. So orphans are adopted, which makes them findable. One that uses torch and
that nanguard could not reach is noticed here, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanguard.errors import installing
from nanguard.run.control import ATTACHED, REACHED, UNGUARDED, leave, processes

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterable, Iterator

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


# Part of the name of the library that every Python process with torch has in its memory.
_LIBRARY = b"libtorch_python"
# Seconds between two looks: the first ones soon, as a run may be over soon.
_FIRST_LOOKS = (1.0, 2.0, 2.0)
_LATER_LOOKS = 5.0


@contextlib.contextmanager
def noticed(control: Path, boot: str, say: Callable[[str], None]) -> Iterator[None]:
    """Looks after the processes below this one as long as the context is open.

    Args:
        control: The folder with the notes of the run.
        boot: The folder that has to be on their PYTHONPATH.
        say: Called once, if there is a process that is not guarded.
    """
    if sys.platform != "linux":
        yield
        return
    over = threading.Event()
    thread = threading.Thread(target=_look, args=(control, boot, say, over), daemon=True)
    # A signal must interrupt the thread that waits for the command, and not this one.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        yield
    finally:
        over.set()
        thread.join()


def _look(control: Path, boot: str, say: Callable[[str], None], over: threading.Event) -> None:
    looks = list(_FIRST_LOOKS)
    while not over.wait(looks.pop(0) if looks else _LATER_LOOKS):
        if processes(control, ATTACHED):
            return
        found = find_unguarded(descendants(), control)
        if found is not None and not processes(control, ATTACHED):
            leave(control, f"{UNGUARDED}{found}")
            say(why_not_guarded(found, boot))
            return


def find_unguarded(pids: Iterable[int], control: Path, proc: Path = Path("/proc")) -> int | None:
    """Returns the first process that uses torch and that nanguard is not in; None if none does.

    Args:
        pids: The processes to look at.
        control: The folder with the notes of the run.
        proc: Where the system shows its processes.
    """
    using = [pid for pid in pids if _LIBRARY in _read(proc / str(pid) / "maps")]
    if not using:
        return None
    # Read after the libraries: the note is there before torch is.
    reached = processes(control, REACHED) | processes(control, ATTACHED)
    images = {_image(pid, proc) for pid in reached}
    for pid in using:
        # A forked process, such as a worker of a loader, has what its parent has, but no note.
        if pid not in reached and _image(pid, proc) not in images:
            return pid
    return None


def why_not_guarded(pid: int, boot: str, proc: Path = Path("/proc")) -> str:
    """Returns a line about a process that nanguard could not reach.

    Args:
        pid: The process.
        boot: The folder that would have to be on its PYTHONPATH.
        proc: Where the system shows its processes.
    """
    why = "it was started with its own PYTHONPATH"
    what = f"install nanguard in its environment ({installing()})"
    if boot in python_path(_read(proc / str(pid) / "environ")):
        why = "its Python ignores PYTHONPATH (-E, -I or -S)"
        what += ", and leave out -S"
    return f"process {pid} uses torch but is not guarded: {why}; {what}"


def python_path(environ: bytes) -> list[str]:
    """Returns the folders on the PYTHONPATH of a process, given its environment."""
    for entry in environ.split(b"\0"):
        if entry.startswith(b"PYTHONPATH="):
            return os.fsdecode(entry.partition(b"=")[2]).split(os.pathsep)
    return []


def _image(pid: int, proc: Path) -> tuple[bytes, bytes]:
    """Returns what a process was started with; its forks have the same."""
    return _read(proc / str(pid) / "cmdline"), _read(proc / str(pid) / "environ")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
