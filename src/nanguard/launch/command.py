"""Starts a command so that every Python process below it is guarded, and sees it through."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanguard.errors import IncidentError, LaunchError
from nanguard.launch.children import end_guarded, wait_for
from nanguard.launch.options import HOME, VARIABLE, Options
from nanguard.launch.trust import sign
from nanguard.launch.waiting import wait_for_explanations
from nanguard.record import TRACKERS
from nanguard.trackers import TRACK, TRACK_DIR, check_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

STOPPED = 3
# The note that the user, or the system, wanted the run to end.
INTERRUPTED = "interrupted"
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# Slurm sends these to every process of a step, so that the command has them already.
_USERS = (signal.SIGUSR1, signal.SIGUSR2)


def run_command(
    command: Sequence[str],
    *,
    incidents: Path,
    on_bad: str = "skip",
    max_bad: int | None = None,
    trace: bool = True,
    quiet: bool = False,
    control: Path | None = None,
    track: Sequence[str] = (),
) -> int:
    """Runs a command under the guard; returns the exit code of ``nanguard run``.

    Args:
        command: The command.
        incidents: The folder for incidents.
        on_bad: What to do about a bad step: skip, rollback or stop.
        max_bad: How many bad steps the run may meet; None for no such bound.
        trace: Whether a bad step is replayed and explained.
        quiet: Whether to say nothing.
        control: An empty folder for what the processes tell, of whoever is going to read it and
            to start the command again; None if nobody is.
        track: Where else the run is written to, such as ``tensorboard``.
    """
    must_be_there(command)
    chosen = check_names(track, "nanguard run --track")
    with contextlib.ExitStack() as stack:
        place = control or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="nanguard-run-"))
        )
        options = Options(
            incidents=str(incidents.absolute()),
            control=str(place),
            command=tuple(command),
            folder=str(Path.cwd()),
            signature=sign(list(command), str(Path.cwd())),
            on_bad=on_bad,
            max_bad=max_bad,
            trace=trace,
            quiet=quiet,
            recover=control is not None,
            track=chosen,
        )
        code = _run_and_tell(command, options)
        return STOPPED if any(place.glob("stopped-*")) else code


def must_be_there(command: Sequence[str]) -> None:
    """Stops where there is no command that could be run.

    Raises:
        LaunchError: There is none.
    """
    if not command:
        raise LaunchError(
            "there is no command to run.",
            where="nanguard run",
            do="Write it after two dashes: nanguard run -- python train.py --lr 1e-3",
        )
    if shutil.which(command[0]) is None:
        raise LaunchError(
            f"the command {command[0]!r} was not found, or cannot be executed.",
            where="nanguard run",
            do="Check its spelling; for a script, write: nanguard run -- python train.py",
        )


def _run_and_tell(command: Sequence[str], options: Options) -> int:
    """Runs a command, waits until its incidents are explained, and says what came of them."""
    control, incidents = Path(options.control), Path(options.incidents)
    before = set(incidents.glob("*/incident.json"))
    code = _run(command, options)
    if options.recover and code:
        end_guarded(control)
    waited = _wait_for_explanations(control, options)
    new = sorted(set(incidents.glob("*/incident.json")) - before)
    if new and waited and options.trace:
        _explain_the_rest(new, options)
    if new and not options.quiet:
        _tell(new)
    if not any(control.glob("attached-*")):
        _say("nothing was guarded: no Python process that imports torch was seen", options)
    return code


def environment(options: Options) -> dict[str, str]:
    """Returns the environment in which Python processes find nanguard."""
    home = Path(__file__).resolve().parents[1]
    boot = str(Path(__file__).resolve().parent / "boot")
    path = os.environ.get("PYTHONPATH")
    inherited = dict(os.environ)
    if options.track:
        inherited[TRACK] = ",".join(options.track)
    if TRACK in inherited:
        inherited.setdefault(TRACK_DIR, str(Path(options.incidents) / TRACKERS))
    return {
        **inherited,
        VARIABLE: options.to_text(),
        HOME: str(home),
        "PYTHONPATH": boot if not path else os.pathsep.join([boot, path]),
    }


def _run(command: Sequence[str], options: Options) -> int:
    try:
        process = subprocess.Popen(list(command), env=environment(options))  # noqa: S603 - it is the user's
    except OSError as error:
        raise LaunchError(
            f"the command {command[0]!r} could not be started: {error.strerror}.",
            where="nanguard run",
            do="See whether it runs without nanguard.",
        ) from error
    with _forwarded_signals(process, Path(options.control)):
        while True:
            try:
                code = wait_for(process) if options.recover else process.wait()
                break
            except KeyboardInterrupt:
                # A terminal tells the command, too; how it ends is its own business.
                Path(options.control, INTERRUPTED).touch()
                if not _in_foreground():
                    process.send_signal(signal.SIGINT)
    return 128 - code if code < 0 else code


def _in_foreground() -> bool:
    """Returns whether a terminal sends its interrupts to this process and the command alike."""
    try:
        with open("/dev/tty") as terminal:  # noqa: PTH123 - a device
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


@contextlib.contextmanager
def _forwarded_signals(process: subprocess.Popen[Any], control: Path) -> Iterator[None]:
    def forward(number: int, _frame: Any) -> None:
        if number in _FORWARDED:
            (control / INTERRUPTED).touch()
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    users = signal.SIG_IGN if "SLURM_JOB_ID" in os.environ else forward
    before |= {number: signal.signal(number, users) for number in _USERS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait_for_explanations(control: Path, options: Options) -> bool:
    """Waits until every incident that is being explained is; returns False if interrupted."""

    def tell(names: set[str]) -> None:
        if not options.quiet and sys.stderr.isatty():
            print(f"nanguard: explaining {', '.join(sorted(names))} ...", file=sys.stderr)  # noqa: T201

    waited = wait_for_explanations(control, options.patience * 1.5, tell)
    if not waited:
        _interrupted(options)
    return waited


def _interrupted(options: Options) -> None:
    """Leaves word that the user wants an end, so that nothing is started again."""
    Path(options.control, INTERRUPTED).touch()
    _say("interrupted; what is not explained by now stays as it is", options)


def _explain_the_rest(paths: list[Path], options: Options) -> None:
    """Runs the command again for the first incident, if nothing else could explain any."""
    from nanguard.launch import again

    first, found = paths[0], _read(paths[0])
    if found is None or found["replay"]["verdict"] != "not-replayed" or found["run"]["ranks"] != 1:
        return
    seconds = found["run"]["seconds"]
    # Whatever else a shell script does would happen a second time.
    plain = Path(options.command[0]).name.startswith("python")
    if seconds > again.SHORT or not plain:
        say = f"the step came after {seconds:.0f} s; to find out why, run: "
        _say(say + f"nanguard replay --explain {_short(first.parent)}", options)
        return
    _say("running the command once more to find out why ...", options)
    try:
        again.explain(first.parent, seconds=options.patience)
    except KeyboardInterrupt:
        _interrupted(options)


def _tell(paths: list[Path]) -> None:
    """Says, for each incident, what was found out."""
    for path in paths:
        found = _read(path)
        if found is None:
            continue
        cause, origin = found.get("cause") or {}, found.get("origin") or {}
        if not cause:
            continue
        place = ""
        if origin.get("line"):
            place = f" at {Path(str(origin['file'])).name}:{origin['line']} ({origin.get('op')})"
        rank = f" on rank {found['rank']}" if found["run"]["ranks"] > 1 else ""
        print(  # noqa: T201 - the user is here
            f"nanguard: step {found['step']}{rank}: {cause.get('code')}{place}: "
            f"{cause.get('summary')}\n          nanguard explain {_short(path.parent)}",
            file=sys.stderr,
        )


def _say(text: str, options: Options) -> None:
    if not options.quiet:
        print(f"nanguard: {text}", file=sys.stderr, flush=True)  # noqa: T201


def _short(path: Path) -> str:
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)


def _read(path: Path) -> dict[str, Any] | None:
    """Returns an incident of this run; None if the file is not one."""
    from nanguard import incident

    try:
        found = incident.read(path)
    except IncidentError:
        return None
    return found if {"run", "replay", "step", "rank"} <= set(found) else None
