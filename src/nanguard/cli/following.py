"""``nanguard watch``: runs as they go on, in the terminal."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanguard.errors import UsageError
from nanguard.view.report.fields import literal
from nanguard.view.terminal.session import Session
from nanguard.view.terminal.view import View
from nanguard.view.terminal.watching import OnAlarm, Watching

if TYPE_CHECKING:
    from nanguard.view.terminal.watched import Wanted


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line asks for, besides what is to be watched.

    Attributes:
        on_alarm: The command to run on an alarm.
        cool_down: Seconds before the same kind of alarm runs it again.
        bell: Whether the terminal rings on an alarm.
        until_alarm: Whether the first alarm ends it, with exit code 1.
        plain: Whether lines are wanted also on a terminal.
        every: Seconds between two plain lines.
    """

    on_alarm: str | None = None
    cool_down: float = 300.0
    bell: bool = False
    until_alarm: bool = False
    plain: bool = False
    every: float = 10.0


def run_watch(wanted: Wanted, asked: Asked) -> int:
    """Watches runs; returns the exit code.

    Raises:
        NanguardError: There is nothing to watch, or it cannot be read.
    """
    far = [path for path in wanted.paths if "://" in path or path == "-"]
    if far:
        raise UsageError(
            f"{literal(far[0])} cannot be watched.",
            where="nanguard watch",
            do="Give a log or a folder of this machine.",
        )
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    view = not wanted.once and not asked.plain and _is_screen()
    command = None if asked.on_alarm is None else OnAlarm(asked.on_alarm, asked.cool_down, view)
    watching = Watching(Session(wanted), command, asked.bell, asked.until_alarm, asked.every)
    try:
        _watch(watching, wanted, in_view=view)
    except KeyboardInterrupt:
        pass  # the way to say that it is enough
    except BrokenPipeError:
        # Whoever reads has read enough; what Python still wants to write goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    for problem in watching.finish():
        sys.stderr.write(f"nanguard: {problem}\n")
    return 1 if asked.until_alarm and watching.alarmed else 0


def _watch(watching: Watching, wanted: Wanted, *, in_view: bool) -> None:
    if wanted.once:
        watching.once()
        told = [(run, one) for run in watching.session.runs for one in run.state.happenings]
        watching.print_news(told, last=True)
    elif in_view:
        from nanguard.view.terminal.screen import Screen

        encoding = (sys.stdout.encoding or "").lower().replace("-", "")
        with Screen() as screen, suppress(KeyboardInterrupt):
            watching.in_view(screen, View(plain=not encoding.startswith("utf")))
        watching.print_news([], last=True)
    else:
        watching.in_lines()


def _is_screen() -> bool:
    """Returns whether there is a terminal that can show a view."""
    return os.name == "posix" and sys.stdout.isatty() and os.environ.get("TERM", "") != "dumb"
