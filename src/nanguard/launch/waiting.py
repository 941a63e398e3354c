"""Waits for processes that explain incidents, shows that it does, and ends those that hang."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import sys
import time
from typing import TYPE_CHECKING, TextIO

from nanguard.diagnosis.limits import deadline, load_now, read_note
from nanguard.launch.notes import EXPLAINING, TRYING, WAITING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# Seconds between two looks.
LOOK = 0.05


class SignOfLife:
    """Shows that something takes its time: with the seconds on a terminal, otherwise in two lines.

    Attributes:
        began: When it began; None if it has not.
    """

    def __init__(
        self,
        *,
        quiet: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Shows nothing before the first call of ``show``.

        Args:
            quiet: Whether to show nothing at all.
            stream: Where to; the standard error by default.
            clock: Returns the time in seconds.
        """
        self._stream = stream or sys.stderr
        self._quiet = quiet
        self._terminal = self._stream.isatty()
        self._clock = clock
        self._text = ""
        self._shown = -1
        self.began: float | None = None

    def show(self, text: str) -> None:
        """Says what is being done; called again and again as long as it is.

        Args:
            text: What is being done, such as ``explaining step-000007-rank0``.
        """
        if self.began is None:
            self.began, self._text = self._clock(), text
            if not self._terminal:
                self._write(f"nanguard: {text} ...\n")
        seconds = int(self._clock() - self.began)
        if self._terminal and (seconds, text) != (self._shown, self._text):
            # A line that is wrapped cannot be written over.
            room = shutil.get_terminal_size().columns - 30
            cut = text if len(text) <= room else text[: max(room, 0)] + "~"
            self._write(f"\r\x1b[Knanguard: {cut} ... {seconds} s")
        self._shown, self._text = seconds, text

    def end(self, outcome: str = "finished") -> None:
        """Takes the line away, or says that it is over."""
        if self.began is None:
            return
        seconds = self._clock() - self.began
        self.began, self._shown = None, -1
        line = f"nanguard: {outcome} after {seconds:.0f} s\n"
        self._write("\r\x1b[K" if self._terminal else line)

    def _write(self, text: str) -> None:
        if not self._quiet:
            self._stream.write(text)
            self._stream.flush()


def wait_for_explanations(
    control: Path, seconds: float, tell: Callable[[set[str]], None] | None = None
) -> bool:
    """Waits until every incident that is being explained is; returns False if interrupted.

    An explanation is left alone as long as each of its replays ends within its time, which the
    explanation itself decides about. One that shows no progress any more is ended.

    Args:
        control: The folder in which notes about explanations are left.
        seconds: How long an explanation may take to begin with its first replay, on an idle
            machine.
        tell: Called at each look with the names of what is waited for.
    """
    since: dict[str, float] = {}
    try:
        while names := _unfinished(control):
            if tell is not None:
                tell(names)
            _end_overdue(control, names, since, seconds)
            time.sleep(LOOK)
    except KeyboardInterrupt:
        for name in _unfinished(control):
            _end_explanation(control, name)
        return False
    return True


def _end_overdue(control: Path, names: set[str], since: dict[str, float], seconds: float) -> None:
    """Ends the explanations that have shown no progress for too long."""
    now, load = time.monotonic(), load_now()
    for name in names:
        until = read_note(control / f"{TRYING}{name}")
        if now >= deadline(since.setdefault(name, now), seconds, until, load):
            _end_explanation(control, name)


def _end_explanation(control: Path, name: str) -> None:
    """Ends what explains an incident, with everything it has started."""
    path = control / f"{EXPLAINING}{name}"
    if _is_locked(path):
        with contextlib.suppress(OSError, ValueError):
            os.killpg(os.getpgid(int(path.read_text())), signal.SIGKILL)
    with contextlib.suppress(OSError):
        (control / f"{WAITING}{name}").unlink()


def _unfinished(control: Path) -> set[str]:
    waiting = {path.name.removeprefix(WAITING) for path in control.glob(f"{WAITING}*")}
    return waiting | {
        path.name.removeprefix(EXPLAINING)
        for path in control.glob(f"{EXPLAINING}*")
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
