"""The terminal: keys come in one by one, and only lines that have changed go out."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from types import FrameType, TracebackType

    from rich.text import Text

_ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"
_LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"
_ENDING = ("SIGTERM", "SIGHUP")


class Ended(SystemExit):
    """A signal asked the program to end."""


class Screen:
    """The terminal while it shows a view; as it was before, afterwards.

    Attributes:
        bytes: How much was written to it.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._input = sys.stdin.fileno() if sys.stdin and sys.stdin.isatty() else None
        self._modes: Any = None
        self._shown: list[str] = []
        self._size = (0, 0)
        self._console = Console(force_terminal=True, legacy_windows=False, markup=False)
        self._handlers: dict[int, Any] = {}
        self._open_input = True

    def __enter__(self) -> Screen:
        for name in (*_ENDING, "SIGTSTP"):
            if hasattr(signal, name):
                number = getattr(signal, name)
                react = self._pause if name == "SIGTSTP" else _end
                self._handlers[number] = signal.signal(number, react)
        self._enter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with suppress(OSError):  # a terminal that is gone needs nothing back
            self._leave()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def size(self) -> tuple[int, int]:
        """Returns columns and lines."""
        try:
            found = os.get_terminal_size(sys.stdout.fileno())
        except OSError:
            return 80, 24
        return (found.columns or 80), (found.lines or 24)

    def show(self, lines: list[Text]) -> None:
        """Draws a frame: what is there already is not sent again."""
        size = self.size()
        out: list[str] = []
        if size != self._size:
            self._size, self._shown = size, []
            out.append("\x1b[2J")
        told = [self._told(line) for line in lines[: size[1]]]
        for number, line in enumerate(told):
            if number >= len(self._shown) or self._shown[number] != line:
                out.append(f"\x1b[{number + 1};1H{line}\x1b[K")
        self._shown = told
        self._write("".join(out))

    def bell(self) -> None:
        """Rings."""
        self._write("\a")

    def wait(self, seconds: float) -> str:
        """Waits, and returns the keys that were pressed meanwhile."""
        if self._input is None or not self._open_input:
            time.sleep(seconds)
            return ""
        ready, _, _ = select.select([self._input], [], [], seconds)
        if not ready:
            return ""
        keys = os.read(self._input, 64)
        self._open_input = bool(keys)
        return keys.decode("utf-8", "replace")

    def _told(self, line: Text) -> str:
        with self._console.capture() as captured:
            self._console.print(line, end="", soft_wrap=True, highlight=False)
        return captured.get()

    def _write(self, text: str) -> None:
        if not text:
            return
        encoding = sys.stdout.encoding or "utf-8"
        data = text.encode(encoding, "replace")
        self.bytes += len(data)
        sys.stdout.buffer.write(data)
        sys.stdout.flush()

    def _enter(self) -> None:
        if self._input is not None:
            import termios
            import tty

            self._modes = termios.tcgetattr(self._input)
            tty.setcbreak(self._input)
        self._size = (0, 0)
        self._write(_ENTER)

    def _leave(self) -> None:
        self._write(_LEAVE)
        if self._input is not None and self._modes is not None:
            import termios

            termios.tcsetattr(self._input, termios.TCSADRAIN, self._modes)

    def _pause(self, number: int, frame: FrameType | None) -> None:
        """Gives the terminal back while the program is stopped."""
        self._leave()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._enter()


def _end(number: int, frame: FrameType | None) -> None:
    raise Ended(128 + number)
