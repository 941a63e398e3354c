"""Notices a process that uses torch and that nanguard could not reach.

A launcher that sets a PYTHONPATH of its own hides nanguard from the processes it starts, unless
nanguard is installed beside their torch. Nobody would know before the run has ended, so the
launcher looks. It looks at what Linux tells of a process, and no longer than until one is guarded.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from nanguard.run.children import descendants
from nanguard.run.control import ATTACHED, REACHED, UNGUARDED, leave, processes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

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
    what = "install nanguard in its environment (pip install nanguard)"
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
