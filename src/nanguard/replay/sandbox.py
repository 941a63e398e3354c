"""What keeps a replay from touching anything outside of itself.

A replay runs the user's code a second time. It must not write a file, start a program, send
anything, read the standard input, take data from somebody's pipe or move the place in an open file,
as the run itself would notice. Writes that a script does by the usual functions seem to work and go
somewhere else. Everything else is refused by an audit hook, which no early-bound name and no other
spelling of the same system call gets around. What calls the system past Python is held by the
kernel, in a second run of the command (see ``landlock``).
"""

from __future__ import annotations

import _thread
import builtins
import contextlib
import ctypes
import errno
import io
import math
import mmap
import os
import pathlib
import queue
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_FDS = Path("/proc/self/fd")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC
# What changes files, starts programs or reaches other processes and machines.
_REFUSED = frozenset(
    (
        "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink",
        "os.chmod", "os.chown", "os.utime", "os.setxattr", "os.removexattr", "os.mknod",
        "shutil.rmtree", "shutil.move", "shutil.copyfile", "shutil.copytree",
        "shutil.unpack_archive",
        "os.kill", "os.killpg", "os.startfile", "signal.pthread_kill",
        "socket.connect", "socket.sendto", "socket.sendmsg", "socket.bind",
        "sqlite3.connect", "ftplib.connect", "smtplib.connect", "urllib.Request",
    )
)  # fmt: skip
_COMPILED = (
    ("_posixsubprocess", "fork_exec"), ("_posixshmem", "shm_unlink"), ("_posixshmem", "shm_open"),
)  # fmt: skip
# What is put into the place of functions that no audit event tells of: these do nothing.
_UNTOLD = ("mkfifo", "mknod", "chroot", "nice")
# What writes to an open file by its number.
_TO_DESCRIPTOR = (
    "write", "writev", "pwrite", "pwritev", "posix_fallocate", "fchmod", "fchown", "close",
)  # fmt: skip
# What moves data between two of them, and what makes one of them another.
_BETWEEN_DESCRIPTORS = ("sendfile", "copy_file_range", "splice", "dup2", "closerange")
# What ctypes is not to look up meanwhile: ways around all that is held here.
_OF_SYSTEM = frozenset(
    ("syscall", "system", "popen", "fork", "vfork", "clone", "posix_spawn", "posix_spawnp",
     "execl", "execle", "execlp", "execv", "execve", "execvp", "kill", "killpg", "tgkill",
     "open", "open64", "openat", "creat", "fopen", "fopen64", "write", "pwrite", "pwrite64",
     "writev", "pwritev", "fwrite", "truncate", "truncate64", "ftruncate", "ftruncate64",
     "fallocate", "unlink", "unlinkat", "remove", "rmdir", "rename", "renameat", "renameat2",
     "mkdir", "mkdirat", "mkfifo", "mknod", "link", "linkat", "symlink", "symlinkat", "chmod",
     "fchmod", "fchmodat", "chown", "fchown", "lchown", "utime", "utimes", "chdir", "fchdir",
     "mmap", "mmap64", "sendfile", "splice", "copy_file_range", "send", "sendto", "sendmsg",
     "connect", "bind", "shm_unlink", "dup2", "dup3", "PyRun_SimpleString"),
)  # fmt: skip
# What all threads of a process share: the folder that it works in, and what it may use.
_OF_ALL_THREADS = frozenset(("os.chdir", "resource.setrlimit", "resource.prlimit"))
_THREADS = frozenset(("_thread.start_new_thread", "_thread.start_joinable_thread"))
_PROGRAMS = frozenset(
    (
        "subprocess.Popen", "os.system", "os.exec", "os.spawn", "os.posix_spawn", "os.fork",
        "os.forkpty",
    )
)  # fmt: skip


class OutsideError(PermissionError):
    """The replay would have reached outside of itself.

    Code that copes with a file system that cannot be written to copes with this.
    """

    def __init__(self, what: str) -> None:
        super().__init__(errno.EACCES, what)


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


_OUR_THREADS = "nanguard-"
# Who holds which thread back; an audit hook cannot be taken off again.
_armed: dict[int, Outside] = {}
_everywhere: list[Outside] = []
_installed = False


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if not _armed and not _everywhere:
        return
    outside = _armed.get(threading.get_ident()) or (_everywhere[0] if _everywhere else None)
    if outside is None or outside.lets():
        return
    if event == "open":
        outside.judge_open(*args[:3])
    elif event == "mmap.__new__":
        outside.judge_map(*args[:3])
    elif event in _OF_ALL_THREADS | _THREADS and not _everywhere:
        outside.refuse(event)
    elif event == "ctypes.dlsym" and args[1] in _OF_SYSTEM and not outside.programs:
        outside.refuse(f"call {args[1]} of the system")
    elif event in _REFUSED or (event in _PROGRAMS and not outside.programs):
        outside.refuse(event.replace(".", " ", 1) if event.startswith("socket") else event)


def everywhere() -> Outside | None:
    """Returns what holds this whole process back; None if nothing does."""
    return _everywhere[0] if _everywhere else None


class Outside:
    """Keeps this thread, or a whole process, from changing anything outside of it.

    Attributes:
        folder: Where files go that are written meanwhile.
        allowed: Whether this is our own doing.
        programs: Whether others may be started; only where the kernel holds them back, too.
    """

    def __init__(self, folder: Path | None = None, *, programs: bool = False) -> None:
        self.programs = programs
        self._own_folder = folder is None
        self._folder = folder
        self._thread = threading.get_ident()
        self._files: dict[str, str] = {}
        self._made = 0
        self._undo: list[tuple[Any, str, Any]] = []
        # Files of the run, of which a replay in place has the same numbers.
        self._shared: frozenset[int] = frozenset()
        self._environment: dict[str, str] = {}
        self._umask = os.umask
        self._mask: int | None = None  # what it was, once something has changed it
        self._open = io.open
        self._os_open = os.open
        self._start = threading.Thread.start
        self._ourselves_in: set[int] = set()  # threads
        self.allowed = False

    @property
    def folder(self) -> Path:
        """Where files go that are written meanwhile."""
        if self._folder is None:
            with self._ourselves():
                self._folder = Path(tempfile.mkdtemp(prefix="nanguard-replay-"))
        return self._folder

    def __enter__(self) -> Outside:
        """Holds this thread back."""
        self._shared = frozenset(_open_fds())
        self._environment = dict(os.environ)
        self._arm()
        _armed[self._thread] = self
        self._replace_functions()
        return self

    def __exit__(self, *_exc: object) -> None:
        for owner, name, before in reversed(self._undo):
            setattr(owner, name, before)
        self._undo.clear()
        _armed.pop(self._thread, None)
        if self._mask is not None:
            self._umask(self._mask)
        if os.environ != self._environment:
            os.environ.clear()
            os.environ.update(self._environment)
        if self._own_folder and self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def for_good(self) -> None:
        """Holds this process back until it ends."""
        self._arm()
        _everywhere.append(self)
        self._replace_functions()

    def go_on_in(self, folder: Path) -> None:
        """Writes to another folder from now on, in a copy of the process; starts nothing."""
        with self._ourselves():
            for name, shadow in self._files.items():
                if os.path.isfile(shadow):  # noqa: PTH113
                    shutil.copyfile(shadow, folder / Path(shadow).name)
                self._files[name] = str(folder / Path(shadow).name)
        self._folder, self.programs, self.allowed = folder, False, False
        self._thread = threading.get_ident()
        self._replace_torch()

    def refuse(self, what: str) -> None:
        """Refuses something.

        Raises:
            OutsideError: Always.
        """
        raise OutsideError(f"a replay does not do this: {what}")

    def judge_open(self, path: Any, mode: Any, flags: Any = 0) -> None:
        """Refuses to open a file for writing, except where it cannot harm."""
        if isinstance(mode, str):
            writes = bool(set(mode) & set("wax+"))
        else:
            writes = isinstance(flags, int) and bool(flags & _WRITES)
        if not writes:
            return
        if isinstance(path, int):
            self._judge_descriptor(path)
            return
        name = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else str(path)
        if not self._is_nobodys(os.path.realpath(name)):
            raise OutsideError(f"a replay does not write to {name}")

    def judge_map(self, descriptor: Any, _length: Any, access: Any) -> None:
        """Refuses to put a file of the run into memory where it can be written to."""
        if access not in (mmap.ACCESS_READ, mmap.ACCESS_COPY):
            self._judge_descriptor(descriptor)

    def _judge_descriptor(self, descriptor: Any) -> None:
        if descriptor in self._shared:
            raise OutsideError(f"a replay does not write to file {descriptor}, which is the run's")

    def _is_nobodys(self, name: str) -> bool:
        """Returns whether a file without links in its name is ours, a device, or this process."""
        if self._folder is not None and name.startswith(os.path.join(self._folder, "")):  # noqa: PTH118
            return True
        if name.startswith(f"/proc/{os.getpid()}/"):
            return "/fd/" not in name
        try:
            return name.startswith("/dev/") and stat.S_ISCHR(os.stat(name).st_mode)  # noqa: PTH116
        except OSError:
            return False

    def open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """Opens a file as ``open`` does; what is written goes somewhere else."""
        if isinstance(file, int) or not self._is_held_back():
            return self._open(file, mode, *args, **kwargs)
        writes = bool(set(mode) & set("wax+"))
        # A file that must be new was made by the run itself.
        return self._open(self.path(file, writes=writes), mode.replace("x", "w"), *args, **kwargs)

    def open_descriptor(self, path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        """Opens a file as ``os.open`` does; what is written goes somewhere else."""
        writes = bool(flags & _WRITES)
        # A file that must be new was made by the run itself.
        return self._os_open(
            self.path(path, writes=writes), flags & ~os.O_EXCL if writes else flags, *args, **kwargs
        )

    def path(self, file: Any, *, writes: bool) -> Any:
        """Returns where a file really is."""
        try:
            name = os.path.abspath(os.fsdecode(file))  # noqa: PTH100 - users pass bytes, too
        except TypeError:
            return file
        if name not in self._files and writes and self._is_nobodys(os.path.realpath(name)):
            return file
        if name not in self._files and writes:
            self._made += 1
            shadow = str(self.folder / str(self._made))
            if os.path.isfile(name):  # noqa: PTH113
                with self._ourselves():
                    shutil.copyfile(name, shadow)
            self._files[name] = shadow
        return self._files.get(name, file)

    def _is_held_back(self) -> bool:
        here = bool(_everywhere) or _armed.get(threading.get_ident()) is self
        return here and not self.lets()

    def lets(self) -> bool:
        """Returns whether what happens now is our own doing."""
        return self.allowed or threading.get_ident() in self._ourselves_in

    def _arm(self) -> None:
        global _installed  # an audit hook is there for good, so one has to do
        if not _installed:
            sys.addaudithook(_audit)
            _installed = True

    @contextlib.contextmanager
    def _ourselves(self) -> Any:
        here = threading.get_ident()
        again = here in self._ourselves_in
        self._ourselves_in.add(here)
        try:
            yield
        finally:
            if not again:
                self._ourselves_in.discard(here)

    def _replace(self, owner: Any, name: str, new: Callable[..., Any]) -> None:
        """Puts something in the place of a function, for whoever is held back."""
        before = getattr(owner, name)
        self._undo.append((owner, name, vars(owner).get(name, before)))

        def call(*args: Any, **kwargs: Any) -> Any:
            return (new if self._is_held_back() else before)(*args, **kwargs)

        setattr(owner, name, call)

    def _replace_functions(self) -> None:
        self._undo += [(builtins, "open", builtins.open), (io, "open", io.open)]
        # What is imported meanwhile is not compiled into somebody's folders.
        self._undo.append((sys, "dont_write_bytecode", sys.dont_write_bytecode))
        sys.dont_write_bytecode = True
        builtins.open = io.open = self.open
        self._replace(os, "open", self.open_descriptor)
        for name in ("remove", "unlink", "rmdir", "mkdir"):
            self._replace(os, name, _ignored)
        for name in ("rename", "replace"):
            self._replace(os, name, self._moved)
        self._replace(shutil, "rmtree", _ignored)
        for name in _UNTOLD:
            if hasattr(os, name):
                self._replace(os, name, _ignored)
        accessor = getattr(pathlib, "_normal_accessor", None)
        if accessor is not None:  # Python 3.10, whose paths know these functions from the start
            self._replace(accessor, "open", self.open)
            for name in ("unlink", "rmdir", "mkdir"):
                self._replace(accessor, name, _ignored)
            for name in ("rename", "replace"):
                self._replace(accessor, name, self._moved)
        self._replace_programs()
        if not _everywhere:
            self._replace(os, "_exit", sys.exit)  # the run is in the same process
            self._replace_descriptors()
            self._replace(os, "umask", self._change_mask)
            self._replace(threading.Thread, "start", self._start_thread)
            # Until Python 3.12, no audit event tells of it.
            self._replace(_thread, "start_new_thread", _refuse("start a bare thread"))
            self._replace_queues()
        else:
            self._replace(queue.Queue, "put", _put_or_drop)
        if "torch" in sys.modules:
            self._replace_torch()

    def _replace_programs(self) -> None:
        self._replace(os, "system", self._program(os.system))
        self._replace(subprocess.Popen, "__init__", self._program(subprocess.Popen.__init__))
        for module, name in _COMPILED:  # which tell an audit hook nothing
            made = sys.modules.get(module)
            if made is not None and hasattr(made, name):
                self._replace(made, name, self._program(getattr(made, name)))
        self._replace(socket.socket, "connect", _refuse("connect to another machine"))
        if hasattr(signal, "pidfd_send_signal"):
            self._replace(signal, "pidfd_send_signal", _refuse("send a signal"))

    def _replace_descriptors(self) -> None:
        """Leaves open files of the run alone, also where they are named by their numbers."""
        for name in _TO_DESCRIPTOR:
            if hasattr(os, name):
                self._replace(os, name, self._to_descriptor(getattr(os, name)))
        for name in _BETWEEN_DESCRIPTORS:
            if hasattr(os, name):
                self._replace(os, name, _refuse(f"use os.{name}"))

    def _start_thread(self, thread: threading.Thread) -> None:
        """Starts a thread that is held back as well, for as long as it lives."""
        run = thread.run

        def held_back() -> None:
            _armed[threading.get_ident()] = self
            try:
                run()
            finally:
                _armed.pop(threading.get_ident(), None)

        if not thread.name.startswith(_OUR_THREADS):
            thread.run = held_back  # type: ignore[method-assign]
        with self._ourselves():
            self._start(thread)

    def _change_mask(self, mask: int) -> int:
        """Changes which rights new files do not get, until the end of the replay."""
        before = self._umask(mask)
        self._mask = before if self._mask is None else self._mask
        return before

    def _to_descriptor(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(descriptor: Any, *args: Any, **kwargs: Any) -> Any:
            if descriptor not in self._shared:
                return function(descriptor, *args, **kwargs)
            parts = args[0] if args and isinstance(args[0], (list, tuple)) else args[:1]
            return sum(len(part) for part in parts if isinstance(part, (bytes, bytearray)))

        return call

    def _replace_queues(self) -> None:
        """Leaves the queues of other threads alone; those that a replay makes are its own."""
        begin, put, get = queue.Queue.__init__, queue.Queue.put, queue.Queue.get
        own: weakref.WeakSet[queue.Queue[Any]] = weakref.WeakSet()
        refuse = _refuse("take what another thread has put in a queue")

        def begun(made: queue.Queue[Any], *args: Any, **kwargs: Any) -> None:
            begin(made, *args, **kwargs)
            own.add(made)

        def put_into(one: queue.Queue[Any], *args: Any, **kwargs: Any) -> None:
            if one in own:
                put(one, *args, **kwargs)

        def get_from(one: queue.Queue[Any], *_args: Any, **_kwargs: Any) -> Any:
            # Nobody else puts anything into its own ones, so there is nothing to wait for.
            return get(one, block=False) if one in own else refuse()

        self._replace(queue.Queue, "__init__", begun)
        self._replace(queue.Queue, "put", put_into)
        self._replace(queue.Queue, "get", get_from)

    def _replace_torch(self) -> None:
        import torch

        self._replace(torch, "save", self._through_shadow(torch.save, writes=True))
        load = self._through_shadow(torch.load, writes=False)  # noqa: TID251 - the user's own
        self._replace(torch, "load", load)
        safetensors: Any = sys.modules.get("safetensors.torch")
        if safetensors is not None:
            # Written by compiled code, which opens its files by itself.
            written = self._through_shadow(safetensors.serialize_file, writes=True)
            self._replace(safetensors, "serialize_file", written)

    def _program(self, start: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.programs:
                raise OutsideError("a replay does not start another program")
            return start(*args, **kwargs)

        return call

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

    def _moved(self, source: Any, target: Any, **_kwargs: Any) -> None:
        moved = self._files.pop(os.path.abspath(os.fsdecode(source)), None)  # noqa: PTH100
        if moved is not None:
            self._files[os.path.abspath(os.fsdecode(target))] = moved  # noqa: PTH100


def _ignored(*_args: Any, **_kwargs: Any) -> None:
    """Does nothing: folders, files and the queues of other threads stay as they are."""


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


# Replays that do not come to an end by themselves, and signals that come meanwhile.


class TooLong(BaseException):
    """Leaves a replay that does not come to an end."""


class TimeLimit:
    """Raises in this thread if what is done inside takes too long, also if it waits for a lock."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._thread = threading.get_ident()
        main = threading.current_thread() is threading.main_thread()
        self._in_main = main and hasattr(signal, "SIGALRM")
        self._done, self._late = threading.Event(), threading.Event()
        self._missed = False
        self._before: Any = None
        self._watchdog = threading.Thread(target=self._wait, name="nanguard-limits", daemon=True)

    def __enter__(self) -> None:
        if self._in_main:
            self._before = signal.signal(signal.SIGALRM, self._alarmed)
        try:
            self._watchdog.start()
        except RuntimeError:
            # Python is about to end, and starts no thread any more.
            if self._in_main and math.isfinite(self._seconds):
                self._late.set()
                signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def __exit__(self, *_error: object) -> None:
        self._done.set()
        if self._watchdog.ident is not None:
            self._watchdog.join()
        elif self._in_main:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        if self._in_main:
            signal.signal(signal.SIGALRM, self._before)
            if self._missed:
                signal.raise_signal(signal.SIGALRM)

    def _wait(self) -> None:
        if self._done.wait(None if math.isinf(self._seconds) else self._seconds):
            return
        self._late.set()
        if self._in_main:
            signal.pthread_kill(self._thread, signal.SIGALRM)
        else:
            error = ctypes.py_object(TooLong)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), error)

    def _alarmed(self, _number: int, _frame: Any) -> None:
        if self._late.is_set():
            self._late.clear()
            raise TooLong
        self._missed = True  # an alarm of the script's own, which gets it afterwards


@contextlib.contextmanager
def signals_wait() -> Iterator[None]:
    """Lets signals of the system wait: their handlers must not run inside of a replay."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    names = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGCHLD", "SIGCONT")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [getattr(signal, name) for name in names])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
