"""Channels of the run: what leaves the process when something is written to it.

A replay is given stand-ins for them, which take what is written and drop it.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

Methods = dict[str, Callable[..., Any]]


def _length(data: Any = b"", *_args: Any, **_kwargs: Any) -> int:
    """Returns how much was written, as files and sockets do."""
    return len(data)


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """Does nothing."""


def _never(*_args: Any, **_kwargs: Any) -> Future[Any]:
    """Returns work that nobody will do."""
    work: Future[Any] = Future()
    work.cancel()
    return work


_FILE: Methods = {
    "write": _length, "writelines": _nothing, "flush": _nothing, "truncate": _nothing,
    "seek": _nothing, "close": _nothing,
}  # fmt: skip
_SOCKET: Methods = {
    "send": _length, "sendall": _nothing, "sendto": _length, "sendmsg": _nothing,
    "sendfile": _nothing, "shutdown": _nothing, "close": _nothing,
}  # fmt: skip
_DATABASE: Methods = dict.fromkeys(
    ("execute", "executemany", "executescript", "commit", "rollback", "close"), _nothing
)
_BAR: Methods = dict.fromkeys(
    (
        "update", "set_postfix", "set_postfix_str", "set_description", "set_description_str",
        "refresh", "write", "display", "clear", "close", "reset", "unpause",
    ),
    _nothing,
)  # fmt: skip
# What writes, by the class that it is a method of; classes are known by name, as few are imported.
_WRITING: dict[str, Methods] = {
    "_csv.writer": {"writerow": _nothing, "writerows": _nothing},
    "socket.socket": _SOCKET,
    "_socket.socket": _SOCKET,
    "ssl.SSLSocket": _SOCKET,
    "mmap.mmap": {
        "write": _length, "write_byte": _nothing, "__setitem__": _nothing, "flush": _nothing,
        "resize": _nothing, "move": _nothing, "seek": _nothing, "close": _nothing,
    },
    "subprocess.Popen": dict.fromkeys(("send_signal", "terminate", "kill"), _nothing),
    "multiprocessing.shared_memory.SharedMemory": {"close": _nothing, "unlink": _nothing},
    "multiprocessing.sharedctypes.SynchronizedBase": {},
    "_queue.SimpleQueue": {"put": _nothing, "put_nowait": _nothing},
    "multiprocessing.queues.Queue": {"put": _nothing, "put_nowait": _nothing, "close": _nothing},
    "multiprocessing.queues.SimpleQueue": {"put": _nothing, "close": _nothing},
    "multiprocessing.connection.Connection": {
        "send": _nothing, "send_bytes": _nothing, "close": _nothing,
    },
    "concurrent.futures._base.Executor": {"submit": _never, "shutdown": _nothing},
    "sqlite3.Connection": _DATABASE,
    "sqlite3.Cursor": _DATABASE,
    "tqdm.std.tqdm": _BAR,
    "rich.progress.Progress": {"advance": _nothing, "update": _nothing, "refresh": _nothing},
    "wandb.sdk.wandb_run.Run": dict.fromkeys(
        ("log", "alert", "save", "log_artifact", "log_code", "finish"), _nothing
    ),
}  # fmt: skip


_known: dict[type, Methods | None] = {}


def _writing(kind: type) -> Methods | None:
    """Returns what writes, of the objects of a class; None if nothing is known to."""
    if kind not in _known:
        names = [f"{cls.__module__}.{cls.__qualname__}" for cls in kind.__mro__]
        found = next((_WRITING[name] for name in names if name in _WRITING), None)
        _known[kind] = _FILE if found is None and issubclass(kind, io.IOBase) else found
    return _known[kind]


def is_channel(value: Any) -> bool:
    """Returns whether something that is written to a value leaves the process."""
    if _writing(type(value)) is None:
        return False
    if not isinstance(value, io.IOBase):
        return True
    if isinstance(value, (io.BytesIO, io.StringIO)):
        return False
    try:
        return value.writable()
    except ValueError:  # closed
        return False


class StandIn:
    """Takes the place of a channel, for one thread."""

    def __init__(self, channel: Any) -> None:
        self._stands_for = channel
        self._thread = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._stands_for, name)
        if threading.get_ident() != self._thread:
            return value
        dropped = (_writing(type(self._stands_for)) or {}).get(name)
        if dropped is not None:
            return dropped
        if isinstance(value, memoryview):  # memory that it shares with others
            value = memoryview(bytearray(value))
        elif is_channel(value):
            value = StandIn(value)
        else:
            return value
        self.__dict__[name] = value
        return value

    def __enter__(self) -> Any:
        return self if threading.get_ident() == self._thread else self._stands_for.__enter__()

    def __exit__(self, *args: object) -> Any:
        if threading.get_ident() != self._thread:
            return self._stands_for.__exit__(*args)
        return None

    def __iter__(self) -> Any:
        return iter(self._stands_for)

    def __getitem__(self, place: Any) -> Any:
        return self._stands_for[place]

    def __setitem__(self, place: Any, value: Any) -> None:
        self.__getattr__("__setitem__")(place, value)


def spared_function(value: Any) -> Any:
    """Returns what a replay calls instead of the method of a channel, or of a system call."""
    owner, name = value.__self__, value.__name__
    if getattr(owner, "__name__", "") in ("posix", "nt") and getattr(os, name, None) is not None:
        # Looked up when it is called: there, ``os`` leaves files of the run alone.
        return lambda *args, **kwargs: getattr(os, name)(*args, **kwargs)
    if not is_channel(owner):
        return value
    stands_in = StandIn(owner)
    return lambda *args, **kwargs: getattr(stands_in, name)(*args, **kwargs)
