"""A progress bar for checks that take longer than a second, on a terminal only."""

from __future__ import annotations

import sys
import time
from typing import Any

_AFTER = 1.0
_EVERY = 0.1


class Progress:
    """Shows how many files are done; call it with what is done and what there is.

    Args:
        quiet: Whether to show nothing at all.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._wanted = not quiet and sys.stderr.isatty()
        self._began = self._shown = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        """Shows where the check is."""
        now = time.monotonic()
        if not self._wanted or now - self._began < _AFTER or now - self._shown < _EVERY:
            return
        self._shown = now
        if self._bar is None:
            self._start(total)
        self._bar.update(self._task, completed=done, total=total)
        self._bar.refresh()

    def _start(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        # No thread of its own: processes are forked while it is shown.
        self._bar = Bar(
            TextColumn("checking"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            auto_refresh=False,
            transient=True,
        )
        self._task = self._bar.add_task("checking", total=total)
        self._bar.start()
