"""Waits for processes that explain incidents, and ends those that take too long."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def wait_for_explanations(
    control: Path, seconds: float, tell: Callable[[set[str]], None] | None = None
) -> bool:
    """Waits until every incident that is being explained is; returns False if interrupted.

    Args:
        control: The folder in which notes about explanations are left.
        seconds: How long to wait at most; what goes on then is ended.
        tell: Called once with the names of what is waited for.
    """
    end = time.monotonic() + seconds
    finished = True
    try:
        while time.monotonic() < end:
            names = _unfinished(control)
            if not names:
                return True
            if tell is not None:
                tell(names)
                tell = None
            time.sleep(0.05)
    except KeyboardInterrupt:
        finished = False
    _end_explanations(control)
    return finished


def _end_explanations(control: Path) -> None:
    """Ends what goes on explaining, with everything it has started."""
    for path in control.glob("explaining-*"):
        if _is_locked(path):
            with contextlib.suppress(OSError, ValueError):
                os.killpg(os.getpgid(int(path.read_text())), signal.SIGKILL)


def _unfinished(control: Path) -> set[str]:
    waiting = {path.name.removeprefix("waiting-") for path in control.glob("waiting-*")}
    return waiting | {
        path.name.removeprefix("explaining-")
        for path in control.glob("explaining-*")
        if _is_locked(path)
    }


def _is_locked(path: Path) -> bool:
    try:
        with path.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
