"""Ends replays that do not come to an end by themselves, and lets signals wait for them."""

from __future__ import annotations

import contextlib
import ctypes
import math
import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


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
