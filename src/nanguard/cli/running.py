"""``nanguard run``, with or without recovery, and ``nanguard demo``."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import sys
from typing import TYPE_CHECKING, Any

from nanguard.cli.commands import BY_NAME
from nanguard.cli.commands.during import RECOVERY
from nanguard.errors import MissingDependencyError, UsageError
from nanguard.incident import NO_BATCH
from nanguard.run.command import must_be_there
from nanguard.run.run_record import LaunchedRun, new_place
from nanguard.run.waiting import tell_user

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nanguard.alerts import Alerts
    from nanguard.cli.commands.before import DemoOptions
    from nanguard.cli.commands.during import RunOptions
    from nanguard.run.recovering.restart_options import RestartOptions

UNABLE = 2


def run_guarded(asked: RunOptions) -> int:
    """Runs a command under the guard, plainly or with recovery; returns the exit code."""
    must_be_there(asked.command)
    if not asked.recover:
        _refuse_what_recovers(asked)
    run = LaunchedRun(asked.run_dir or new_place(asked.command), asked.command)
    if asked.no_batch:
        os.environ[NO_BATCH] = "1"
    guarding: dict[str, Any] = {
        "run_dir": run.folder,
        "on_bad": asked.on_bad,
        "max_bad": asked.max_bad,
        "spikes": asked.spikes,
        "trace": not asked.no_trace,
        "quiet": asked.quiet,
        "explain_seconds": asked.explain_seconds,
        "track": asked.track,
        "quarantine": asked.quarantine,
    }
    code, place = UNABLE, asked.incidents or run.folder
    try:
        with _alerts(asked) as guarding["alerts"]:
            code = _run(asked, place, guarding)
    finally:
        run.ended(code)
    seen = None if asked.quiet else run.see_it()
    if seen is not None:
        tell_user(f"nanguard: {seen}")
    return code


@contextlib.contextmanager
def _alerts(asked: RunOptions) -> Iterator[Alerts | None]:
    """Yields where alerts go; None for nowhere. At the end, waits for those on their way."""
    if not asked.notify:
        yield None
        return
    from nanguard.alerts import Alerts, receiver_of

    alerts = Alerts([receiver_of(target) for target in asked.notify])
    try:
        yield alerts
    finally:
        for problem in alerts.close():
            sys.stderr.write(f"nanguard: {problem}\n")


def _run(asked: RunOptions, incidents: Path, guarding: dict[str, Any]) -> int:
    if not asked.recover:
        from nanguard.run.command import run_command

        return run_command(asked.command, incidents=incidents, **guarding)
    if importlib.util.find_spec("numpy") is None:  # before the run, and not when it has ended
        missing = ModuleNotFoundError(name="numpy")
        raise MissingDependencyError.of("nanguard run --recover", missing)
    from nanguard.run.recovering.recover import recover_command

    return recover_command(asked.command, _wishes(asked), incidents=incidents, **guarding)


def _refuse_what_recovers(asked: RunOptions) -> None:
    """Stops where an option was given that means nothing without ``--recover``."""
    for one in BY_NAME["run"].named():
        if one.words.panel == RECOVERY and getattr(asked, one.name) is not None:
            raise UsageError(
                f"{one.words.names[0]} means nothing without --recover.",
                where="nanguard run",
                do="Give --recover, too; options of the command itself go behind the two dashes.",
            )


def _wishes(asked: RunOptions) -> RestartOptions:
    """Returns the options of recovery as the launcher takes them."""
    from nanguard.run.recovering.restart_options import RestartOptions

    if asked.lr_cut is not None and not 0 < asked.lr_cut <= 1:
        raise _wrong("--lr-cut", asked.lr_cut, "a number above 0 and up to 1, such as 0.5")
    if asked.lr is not None and not (math.isfinite(asked.lr) and asked.lr > 0):
        raise _wrong("--lr", asked.lr, "a number above 0, such as 1e-4")
    if asked.backoff is not None and not math.isfinite(asked.backoff):
        raise _wrong("--backoff", asked.backoff, "seconds, such as 5")
    numbers = {name: getattr(asked, name) for name in ("lr_cut", "max_restarts", "backoff")}
    given: dict[str, Any] = {name: one for name, one in numbers.items() if one is not None}
    return RestartOptions(
        checkpoints=asked.checkpoints,
        arguments=_by_purpose(asked, "arg"),
        config=asked.config,
        keys=_by_purpose(asked, "key"),
        lr=asked.lr,
        **given,
    )


def _by_purpose(asked: RunOptions, ending: str) -> dict[str, str]:
    """Returns the templates of arguments or the keys that were given, by what they are for."""
    purposes = ("resume", "lr", "skip", "seed")
    found = {purpose: getattr(asked, f"{purpose}_{ending}") for purpose in purposes}
    return {purpose: text for purpose, text in found.items() if text is not None}


def _wrong(option: str, value: float, wanted: str) -> UsageError:
    return UsageError(
        f"{option} is {value:g}.", where="nanguard run --recover", do=f"Give {wanted}."
    )


def run_the_demo(options: DemoOptions) -> int:
    """Runs the demo; returns 1 if it does not show what it claims.

    Raises:
        MissingDependencyError: Torch is missing.
    """
    try:
        from nanguard.demo import run_demo
    except ModuleNotFoundError as error:
        raise MissingDependencyError.of("nanguard demo", error) from error
    shown = run_demo(run_dir=options.run_dir, steps=options.steps, quiet=options.quiet)
    return 0 if shown else 1
