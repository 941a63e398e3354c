"""What keeps a replay from touching anything outside of itself.

A replay runs the user's code a second time. It must not write a file, print a line, read the
standard input, take data from somebody's pipe or move the place in an open file, as the run itself
would notice.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import queue
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_FDS = Path("/proc/self/fd")


class OutsideError(RuntimeError):
    """The replay would have reached outside of its process."""


class OpenFiles:
    """The open files of a process at one moment: which, and at what place."""

    def __init__(self, own: Iterable[int]) -> None:
        own = set(own)
        self._places: dict[int, tuple[int, int]] = {}
        self._others: list[int] = []
        for fd in _open_fds():
            if fd in own:
                continue
            try:
                mode = os.fstat(fd).st_mode
                readable = _flags(fd) & os.O_ACCMODE == os.O_RDONLY
                if stat.S_ISREG(mode) and readable:
                    self._places[fd] = (os.lseek(fd, 0, os.SEEK_CUR), mode)
                elif stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or fd < 3:
                    self._others.append(fd)
            except OSError:
                continue

    def detach(self) -> None:
        """Gives this process files of its own: the same to read, and nothing to write to."""
        nothing = os.open(os.devnull, os.O_RDWR)
        for fd in {*self._others, 0, 1, 2}:
            with contextlib.suppress(OSError):
                os.dup2(nothing, fd)
        for fd, (place, _) in self._places.items():
            with contextlib.suppress(OSError):
                again = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
                os.lseek(again, place, os.SEEK_SET)
                os.dup2(again, fd)
                os.close(again)


def _open_fds() -> list[int]:
    try:
        return [int(name) for name in os.listdir(_FDS)]  # noqa: PTH208 - one system call
    except OSError:
        return []


def _flags(fd: int) -> int:
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_GETFL)


class Shadow:
    """Lets the user's code write files, into a folder that is thrown away."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, str] = {}
        self._open = io.open

    def put_on(self) -> None:
        """Begins; it ends with the process."""
        import torch

        builtins.open = io.open = self.open
        for name in ("remove", "unlink", "rmdir", "mkdir"):
            setattr(os, name, self._ignored)
        os.rename = os.replace = self._moved  # type: ignore[assignment]
        shutil.rmtree = self._ignored  # type: ignore[assignment]
        torch.save = self._through_shadow(torch.save, writes=True)
        torch.load = self._through_shadow(torch.load, writes=False)  # noqa: TID251 - the user's own
        safetensors: Any = sys.modules.get("safetensors.torch")
        if safetensors is not None:
            # Written by compiled code, which opens its files by itself.
            written = self._through_shadow(safetensors.serialize_file, writes=True)
            safetensors.serialize_file = written
        os.system = subprocess.Popen.__init__ = _refuse("start another program")  # type: ignore[method-assign]
        socket.socket.connect = _refuse("connect to another machine")  # type: ignore[method-assign]
        queue.Queue.put = _put_or_drop  # type: ignore[method-assign]

    def open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """Opens a file as ``open`` does; what is written goes somewhere else."""
        if isinstance(file, int):
            return self._open(file, mode, *args, **kwargs)
        writes = bool(set(mode) & set("wax+"))
        # A file that must be new was made by the run itself.
        return self._open(self.path(file, writes=writes), mode.replace("x", "w"), *args, **kwargs)

    def path(self, file: Any, *, writes: bool) -> Any:
        """Returns where a file really is."""
        try:
            name = os.path.abspath(os.fspath(file))  # noqa: PTH100 - users pass bytes, too
        except TypeError:
            return file
        if isinstance(name, bytes) or name.startswith(("/dev/", str(self.folder))):
            return file
        if name not in self._files and writes:
            shadow = str(self.folder / str(len(self._files)))
            if os.path.isfile(name):  # noqa: PTH113
                shutil.copyfile(name, shadow)
            self._files[name] = shadow
        return self._files.get(name, file)

    def _through_shadow(self, function: Callable[..., Any], *, writes: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            place = 1 if writes else 0
            values = list(args)
            if len(values) > place and isinstance(values[place], (str, os.PathLike)):
                values[place] = self.path(values[place], writes=writes)
            elif isinstance(kwargs.get("f"), (str, os.PathLike)):
                kwargs["f"] = self.path(kwargs["f"], writes=writes)
            return function(*values, **kwargs)

        return call

    def _ignored(self, *_args: Any, **_kwargs: Any) -> None:
        """Does nothing: folders and files outside stay as they are."""

    def _moved(self, source: Any, target: Any, **_kwargs: Any) -> None:
        moved = self._files.pop(os.path.abspath(os.fspath(source)), None)  # noqa: PTH100
        if moved is not None:
            self._files[os.path.abspath(os.fspath(target))] = moved  # noqa: PTH100


def _refuse(what: str) -> Callable[..., Any]:
    def refused(*_args: Any, **_kwargs: Any) -> Any:
        raise OutsideError(f"a replay does not {what}")

    return refused


def _put_or_drop(self: Any, item: Any, block: bool = True, timeout: Any = None) -> None:  # noqa: FBT001, FBT002
    """Puts an item into a queue whose reader may be a thread that does not exist here."""
    with self.mutex:
        if not 0 < self.maxsize <= self._qsize():
            self._put(item)
            self.unfinished_tasks += 1
            self.not_empty.notify()
