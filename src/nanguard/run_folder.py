"""The folders nanguard writes into: who else may read them, and which process owns one.

Incidents, batches and snapshots hold what a run was fed and has learned, so only the user may read
them. A run folder belongs to one process at a time: two that append to the same record would leave
the record of neither.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from pathlib import Path
from typing import IO, Any

from nanguard.errors import RecordError

log = logging.getLogger("nanguard")

# Where nanguard keeps what it writes in a project, if nobody says otherwise.
HOME = ".nanguard"
LOCK = ".lock"
# Seconds between two signs of life of an owner, and how long one on another host is waited for.
BEAT = 5.0
_SILENT = 6 * BEAT
# A larger file was not written by us.
_LARGEST_LOCK = 4096


def make_private(folder: Path, *, exist_ok: bool = True) -> None:
    """Makes a folder that only the user may look into; one that is there stays as it is.

    Args:
        folder: The folder; its parents are made as the user's settings say.
        exist_ok: Whether it may be there.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=exist_ok)


def keep_out_of_git(home: Path) -> None:
    """Makes the folder of a project that nanguard writes to, which git leaves alone.

    A batch of training data may lie there, which nobody means to publish.

    Args:
        home: The folder; a ``.gitignore`` that is there stays as it is.
    """
    home.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError), (home / ".gitignore").open("x") as file:
        file.write("*\n")


def open_private(path: Path, *, append: bool = False) -> IO[bytes]:
    """Opens a file for writing that only the user may read."""
    flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else os.O_TRUNC)
    handle = os.open(path, flags, 0o600)
    if not append:
        # One that was there may have been anybody's to read.
        with contextlib.suppress(OSError):
            os.fchmod(handle, 0o600)
    return os.fdopen(handle, "ab" if append else "wb")


class FolderLock:
    """Says that a run folder belongs to this process.

    The lock is a file with host, process and the time the process began. A process of this host
    that has ended, or whose number belongs to another by now, has left its lock behind, and it is
    taken over. An owner on another host cannot be looked at: it shows signs of life, and is taken
    for dead when there are none for half a minute.

    Args:
        folder: The run folder, which is there.

    Raises:
        RecordError: Another process owns it.
        OSError: It cannot be written to.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._mine = _this_process()
        while not self._take():
            owner = _read(self._path)
            if owner is not None and self._is_held(owner):
                raise _in_use(folder, owner)
            if owner is not None and not _is_same(owner, self._mine):
                log.warning(
                    "nanguard: the run folder %s was left behind by %s", folder, _in_words(owner)
                )
            self._remove_stale(owner)

    def beat(self) -> None:
        """Shows that the owner is alive."""
        with contextlib.suppress(OSError):
            os.utime(self._path)

    def release(self) -> None:
        """Gives the folder back, if it still belongs to this process."""
        owner = _read(self._path)
        # A fork of this process ends, too, and does not own anything.
        if os.getpid() == self._mine["pid"] and owner is not None and _is_same(owner, self._mine):
            with contextlib.suppress(OSError):
                self._path.unlink()

    def _take(self) -> bool:
        """Makes the lock with its content at once; returns False if there is one."""
        draft = self._path.with_name(f"{LOCK}.{socket.gethostname()}.{os.getpid()}")
        with open_private(draft) as file:
            file.write(json.dumps({**self._mine, "since": time.time()}).encode())
        try:
            os.link(draft, self._path)
        except FileExistsError:
            return False
        except OSError:  # some file systems have no links
            return self._take_without_link(draft)
        finally:
            with contextlib.suppress(OSError):
                draft.unlink()
        return True

    def _take_without_link(self, draft: Path) -> bool:
        try:
            handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return False
        with os.fdopen(handle, "wb") as file:
            file.write(draft.read_bytes())
        return True

    def _is_held(self, owner: dict[str, Any]) -> bool:
        if _is_same(owner, self._mine):
            return False  # another guard of this process, which is over or was forgotten
        here = all(owner.get(key) == self._mine[key] for key in ("host", "namespace"))
        if here:
            return bool(_started(owner["pid"]) == owner["started"])
        return self._shows_life()

    def _shows_life(self) -> bool:
        """Returns whether an owner that cannot be looked at gives a sign of life."""
        with contextlib.suppress(OSError):
            first = self._path.stat().st_mtime_ns
            until = time.monotonic() + _SILENT
            while time.monotonic() < until:
                time.sleep(BEAT / 5)
                if self._path.stat().st_mtime_ns != first:
                    return True
        return False

    def _remove_stale(self, owner: dict[str, Any] | None) -> None:
        """Removes a lock that was left behind; if it changed meanwhile, it is looked at again."""
        doomed = self._path.with_name(f"{LOCK}.{os.getpid()}.stale")
        with contextlib.suppress(FileNotFoundError):
            self._path.rename(doomed)
            if _read(doomed) != owner:
                # Somebody else was quicker, and this is theirs.
                with contextlib.suppress(OSError):
                    os.link(doomed, self._path)
            doomed.unlink()


def _this_process() -> dict[str, Any]:
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "namespace": _namespace(),
        "pid": pid,
        "started": _started(pid),
    }


def _namespace() -> str:
    """Returns in which container this process has its number, as far as the system tells."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _started(pid: object) -> str | None:
    """Returns when a process of this host began; None if there is none with this number."""
    if not isinstance(pid, int) or pid <= 0:
        return None
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None if Path("/proc/self/stat").exists() else _alive(pid)
    fields = status.rpartition(")")[2].split()
    # A process that has ended and that nobody has asked about does not own anything.
    return None if fields[0] in "ZX" else fields[19]


def _alive(pid: int) -> str | None:
    """Returns a word for a process that is there, where the system does not tell its start."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        return "alive"
    return "alive"


def _read(path: Path) -> dict[str, Any] | None:
    """Returns who owns a folder; None if no lock of ours is there."""
    try:
        with path.open("rb") as file:
            owner = json.loads(file.read(_LARGEST_LOCK))
    except (OSError, ValueError, RecursionError):
        return None
    good = isinstance(owner, dict) and {"host", "pid", "started"} <= owner.keys()
    return owner if good else None


def _is_same(owner: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(owner.get(key) == other[key] for key in ("host", "namespace", "pid", "started"))


def _in_words(owner: dict[str, Any]) -> str:
    return f"process {str(owner['pid'])[:20]} on {str(owner['host'])[:100]}"


def _in_use(folder: Path, owner: dict[str, Any]) -> RecordError:
    return RecordError(
        f"the run folder is in use by {_in_words(owner)}.",
        where=str(folder),
        do="Give this run a run_dir of its own, or end the other process first.",
    )
