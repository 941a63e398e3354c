"""What leads out of the process and was open before a replay: files, sockets, queues, bars.

No function is called anew for these, so that nothing could be refused. A replay is given stand-ins:
they take what its thread writes, and drop it. Everything else, and every other thread, reaches the
real thing.
"""

from __future__ import annotations

import io
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

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
    "shutdown": _nothing, "close": _nothing,
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
        dropped = (_writing(type(self._stands_for)) or {}).get(name)
        if dropped is not None and threading.get_ident() == self._thread:
            return dropped
        return getattr(self._stands_for, name)

    def __enter__(self) -> Any:
        return self if threading.get_ident() == self._thread else self._stands_for.__enter__()

    def __exit__(self, *args: object) -> Any:
        if threading.get_ident() != self._thread:
            return self._stands_for.__exit__(*args)
        return None

    def __iter__(self) -> Any:
        return iter(self._stands_for)
