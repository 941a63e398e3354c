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
    if _is_open(stream):
        with contextlib.suppress(OSError, ValueError):
            print(text, file=stream, flush=True)


def _is_open(stream: TextIO | None) -> bool:
    """Returns whether anything can be written to a stream."""
    try:
        # What is written to a stream without a file stays in it, and is an error at the end.
        os.fstat(stream.fileno())  # type: ignore[union-attr]
    except (io.UnsupportedOperation, AttributeError):
        # A stream of a notebook or of the script's own.
        return stream is not None and not getattr(stream, "closed", False)
    except (OSError, ValueError):
        return False
    return True


class SignOfLife:
    """Shows that something takes its time: on a terminal every second, otherwise now and then.

    Attributes:
        began: When it began; None if it has not.
    """

    def __init__(
        self,
        *,
        quiet: bool = False,
        after: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Shows nothing before the first call of ``show``.

        Args:
            quiet: Whether to show nothing at all.
            after: How many seconds it may take without a word.
            stream: Where to; the standard error by default.
            clock: Returns the time in seconds.
        """
        self._stream = stream or sys.stderr
        self._quiet = quiet or not _is_open(self._stream)
        self._terminal = not self._quiet and self._stream.isatty()
        self._after = after
        self._first = after or _FIRST
        self._clock = clock
        self._text = ""
        self._shown = -1
        self._next = self._first
        self.began: float | None = None

    def show(self, text: str, how_far: str = "") -> None:
        """Says what is being done; called again and again as long as it is.

        Args:
            text: What is being done, such as ``explaining step-000007-rank0``.
            how_far: How much of it is done, such as ``step 3 of 7``.
        """
        if self.began is None:
            self.began, self._text = self._clock(), text
        seconds = int(self._clock() - self.began)
        if seconds < self._after:
            return
        far = f"{how_far}, " if how_far else ""
        if self._terminal and (seconds, text) != (self._shown, self._text):
            # A line that is wrapped cannot be written over.
            room = shutil.get_terminal_size().columns - 30 - len(far)
            cut = text if len(text) <= room else text[: max(room, 0)] + "~"
            self._write(f"\r\x1b[Knanguard: {cut} ... {far}{seconds} s")
        elif not self._terminal and self._shown < 0 and not self._after:
            self._write(f"nanguard: {text} ...\n")
        elif not self._terminal and seconds >= self._next:
            self._write(f"nanguard: {text} ... {far}{seconds} s\n")
            self._next = seconds + min(seconds, _SLOWEST)
        self._shown, self._text = seconds, text

    def end(self, outcome: str = "finished") -> None:
        """Takes the line away, or says that it is over, if there was one."""
        if self.began is not None and self._shown >= 0:
            line = f"nanguard: {outcome} after {self._clock() - self.began:.0f} s\n"
            self._write("\r\x1b[K" if self._terminal else line)
        self.began, self._shown, self._next = None, -1, self._first

    def _write(self, text: str) -> None:
        if not self._quiet:
            with contextlib.suppress(OSError, ValueError):
                self._stream.write(text)
                self._stream.flush()
