"""A bound on the processor time that a hostile file can cost."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


class TooSlowError(BaseException):
    """Raised in the midst of a check that takes too long; no rule may take it for its own."""


@contextlib.contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raises ``TooSlowError`` in the block once it has cost so much processor time.

    Where the system has no such clock, or in a thread, the block is not bounded.
    """
    if not hasattr(signal, "ITIMER_VIRTUAL") or (
        threading.current_thread() is not threading.main_thread()
    ):
        yield
        return

    def ring(_number: int, _frame: FrameType | None) -> None:
        raise TooSlowError

    before = signal.signal(signal.SIGVTALRM, ring)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
