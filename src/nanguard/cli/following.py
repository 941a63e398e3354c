"""``nanguard watch``: runs as they go on, in the terminal."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from nanguard.alerts import Alerts, receiver_of
from nanguard.cli.entry import drop_output
from nanguard.cli.incident_names import newest_run, run_named
from nanguard.errors import UsageError
from nanguard.view.report.words import literal
from nanguard.view.terminal.view import View
from nanguard.view.terminal.watch_session import Session, Wanted, Watching

if TYPE_CHECKING:
    from nanguard.cli.commands.during import WatchOptions


def run_watch(asked: WatchOptions) -> int:
    """Watches runs; returns the exit code.

    Raises:
        NanguardError: There is nothing to watch, or it cannot be read.
    """
    wanted = Wanted(
        tuple(map(run_named, asked.paths)) or newest_run(),
        wait=asked.wait,
        once=asked.once,
        total=asked.steps,
        stall=asked.stall,
        pid=asked.pid,
    )
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
    receivers = [receiver_of(one, quiet=view) for one in asked.notify]
    alerts = Alerts(receivers, cool_down=asked.cool_down) if receivers else None
    watching = Watching(Session(wanted), alerts, asked.bell, asked.until_alarm, asked.every)
    try:
        _watch(watching, wanted, in_view=view)
    except KeyboardInterrupt:
        pass  # the way to say that it is enough
    except BrokenPipeError:
        drop_output()
    for problem in watching.finish():
        sys.stderr.write(f"nanguard: {problem}\n")
    return 1 if asked.until_alarm and watching.alarmed else 0


def _watch(watching: Watching, wanted: Wanted, *, in_view: bool) -> None:
    if wanted.once:
        watching.once()
        happenings = [(run, one) for run in watching.session.runs for one in run.state.happenings]
        watching.print_news(happenings, last=True)
    elif in_view:
        from nanguard.view.terminal.view import Screen

        encoding = (sys.stdout.encoding or "").lower().replace("-", "")
        with Screen() as screen, suppress(KeyboardInterrupt):
            watching.in_view(screen, View(plain=not encoding.startswith("utf")))
        watching.print_news([], last=True)
    else:
        watching.in_lines()


def _is_screen() -> bool:
    """Returns whether there is a terminal that can show a view."""
    return os.name == "posix" and sys.stdout.isatty() and os.environ.get("TERM", "") != "dumb"
