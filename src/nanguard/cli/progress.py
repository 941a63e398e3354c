"""How far a check is: a bar on a terminal after a second, a line now and then in a pipe."""

from __future__ import annotations

import sys
import time
from typing import Any

_AFTER = 1.0
_EVERY = 0.1
# Seconds after which a line is written where there is no terminal, and between two.
_LINE_AFTER = 10.0
_LINE_EVERY = 30.0


class Progress:
    """Shows how far a check is; told what is done and what there is.

    Args:
        quiet: Whether to show nothing at all.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._terminal = sys.stderr.isatty()
        self._began = time.monotonic()
        self._shown = self._began - _LINE_EVERY
        self._bar: Any = None
        self._task: Any = None
        self._what = ""

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        """Shows how many files are checked."""
        self._show(done, total, "checking")

    def scanned(self, done: int, total: int) -> None:
        """Shows how many bytes of data, checkpoints and logs are read."""
        self._show(done, total, "scanning")

    def _show(self, done: int, total: int, what: str) -> None:
        now = time.monotonic()
        after, every = (_AFTER, _EVERY) if self._terminal else (_LINE_AFTER, _LINE_EVERY)
        if self._quiet or now - self._began < after or now - self._shown < every:
            return
        self._shown = now
        if not self._terminal:
            unit = f"of {total} files" if what == "checking" else f"of {total / 1e6:.0f} MB"
            count = f"{done}" if what == "checking" else f"{done / 1e6:.0f}"
            seconds = now - self._began
            sys.stderr.write(f"nanguard: {what} ... {count} {unit}, {seconds:.0f} s\n")
            sys.stderr.flush()
            return
        if self._bar is None or what != self._what:
            self._start(total, what)
        self._bar.update(self._task, completed=done, total=total)
        self._bar.refresh()

    def _start(self, total: int, what: str) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
        from rich.progress import Progress as Bar

        if self._bar is not None:
            self._bar.stop()
        files = [MofNCompleteColumn()]
        counts = files if what == "checking" else [DownloadColumn(), TransferSpeedColumn()]
        # No thread of its own: processes are forked while it is shown.
        self._bar = Bar(
            TextColumn(what),
            BarColumn(),
            *counts,
            TimeRemainingColumn(),
            console=Console(stderr=True),
            auto_refresh=False,
            transient=True,
        )
        self._what, self._task = what, self._bar.add_task(what, total=total)
        self._bar.start()
