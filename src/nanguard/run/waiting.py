"""Speaks to the user on the standard error: a line, or a sign that something takes its time."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import time
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable

# Seconds after which a line is written again where there is no terminal, each time later, and how
# late at most: a log that is read afterwards should not be full of them.
_FIRST, _SLOWEST = 10, 120


def tell_user(text: str) -> None:
    """Writes a line to the standard error; a script that has closed it goes on without.

    Args:
        text: The line.
    """
    stream = sys.stderr
    try:
        # What is written to a stream without a file stays in it, and is an error at the end.
        os.fstat(stream.fileno())
    except (io.UnsupportedOperation, AttributeError):
        pass  # a stream of a notebook or of the script's own
    except (OSError, ValueError):
        return
    with contextlib.suppress(OSError, ValueError):
        print(text, file=stream, flush=True)


class SignOfLife:
    """Shows that something takes its time: on a terminal every second, otherwise now and then.

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
        self._next = _FIRST
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
        if not self._terminal and seconds >= self._next:
            self._write(f"nanguard: {text} ... {seconds} s\n")
            self._next = seconds + min(seconds, _SLOWEST)
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
        self.began, self._shown, self._next = None, -1, _FIRST
        line = f"nanguard: {outcome} after {seconds:.0f} s\n"
        self._write("\r\x1b[K" if self._terminal else line)

    def _write(self, text: str) -> None:
        if not self._quiet:
            self._stream.write(text)
            self._stream.flush()
