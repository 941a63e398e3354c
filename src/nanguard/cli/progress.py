"""A progress bar for checks that take longer than a second, on a terminal only."""

from __future__ import annotations

import sys
import time
from typing import Any

_AFTER = 1.0
_EVERY = 0.1


class Progress:
    """Shows how far a check is; told what is done and what there is.

    Args:
        quiet: Whether to show nothing at all.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._wanted = not quiet and sys.stderr.isatty()
        self._began = self._shown = time.monotonic()
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
        if not self._wanted or now - self._began < _AFTER or now - self._shown < _EVERY:
            return
        self._shown = now
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
