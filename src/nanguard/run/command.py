"""Starts a command so that every Python process below it is guarded, and sees it through.

Alerts about new incidents and a bad end are sent from here: the launcher outlives what it starts.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanguard import incident as incidents
from nanguard.alerts import Alert
from nanguard.diagnose import lab
from nanguard.errors import IncidentError, LaunchError
from nanguard.masking import hidden_words
from nanguard.record import TRACKERS
from nanguard.run.children import end_guarded, noticed, wait_for
from nanguard.run.control import (
    ATTACHED,
    HOME,
    INTERRUPTED,
    STEPPED,
    STEPS,
    UNGUARDED,
    VARIABLE,
    Options,
    processes,
)
from nanguard.run.control import STOPPED as STOPPED_NOTE
from nanguard.run.known_faults import read_quarantine
from nanguard.run.run_record import sign
from nanguard.run.waiting import SignOfLife, tell_user
from nanguard.trackers import TRACK, TRACK_DIR, check_names
from nanguard.view.report.words import in_a_line, is_fixable, symptom

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nanguard.alerts import Alerts
    from nanguard.incident import Incident

STOPPED = 3
# Seconds after which a run that made no step is worth a line: a shorter one was a look at --help.
_TRAINS = 2.0
# The folder whose sitecustomize every Python process below the command runs.
BOOT = str(Path(__file__).resolve().parent / "boot")
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# Slurm sends these to every process of a step, so that the command has them already.
_USERS = (signal.SIGUSR1, signal.SIGUSR2)


def run_command(
    command: Sequence[str],
    *,
    incidents: Path,
    run_dir: Path | None = None,
    on_bad: str = "skip",
    max_bad: int | None = None,
    spikes: str = "warn",
    trace: bool = True,
    quiet: bool = False,
    explain_seconds: float | None = None,
    control: Path | None = None,
    track: Sequence[str] = (),
    quarantine: bool = False,
    alerts: Alerts | None = None,
) -> int:
    """Runs a command under the guard; returns the exit code of ``nanguard run``.

    Args:
        command: The command.
        incidents: The folder for incidents.
        run_dir: The folder for the record of the run; None to keep none.
        on_bad: What to do about a bad step: skip, rollback or stop.
        max_bad: How many bad steps the run may meet; None for no such bound.
        spikes: What to do about a loss or gradient norm far above the usual: act, warn or off.
        trace: Whether a bad step is replayed and explained.
        quiet: Whether to say nothing.
        explain_seconds: How many seconds the explanation of one incident may take; None for a
            limit that follows the run and the load of the machine.
        control: An empty folder for what the processes tell, of whoever is going to read it and
            to start the command again; None if nobody is.
        track: Where else the run is written to, such as ``tensorboard``.
        quarantine: Whether loaders leave out samples that were found bad, here or in earlier runs.
        alerts: Who is told of incidents and of a bad end; None for nobody.
    """
    must_be_there(command)
    chosen = check_names(track, "nanguard run --track")
    with contextlib.ExitStack() as stack:
        place = control or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="nanguard-run-"))
        )
        options = Options(
            incidents=str(incidents.absolute()),
            run_dir=None if run_dir is None else str(run_dir.absolute()),
            control=str(place),
            command=tuple(command),
            folder=str(Path.cwd()),
            signature=sign(hidden_words(command), str(Path.cwd())),
            on_bad=on_bad,
            max_bad=max_bad,
            spikes=spikes,
            trace=trace,
            quiet=quiet,
            explain_seconds=explain_seconds,
            recover=control is not None,
            track=chosen,
            quarantine=quarantine,
            left_out=tuple(map(astuple, read_quarantine(Path.cwd()))) if quarantine else None,
        )
        with Alerting(alerts, incidents, command) as alerting:
            code = _run_and_tell(command, options)
            notes = sorted(place.glob(f"{STOPPED_NOTE}*"))
            stopped = notes[0].read_text("utf-8", "replace").strip() if notes else None
            alerting.ended(code, stopped=stopped)
        return code if stopped is None else STOPPED


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
    began = time.monotonic()
    code = _run(command, options)
    took = time.monotonic() - began
    if options.recover and code:
        end_guarded(control)
    new = sorted(set(incidents.glob("*/incident.json")) - before)
    if new and options.trace and not (control / INTERRUPTED).exists():
        _explain_the_rest(new, options)
    if new and not options.quiet:
        _tell(new)
    line = nothing_guarded(control, code, took)
    if line and not new:
        _say(line, options)
    return code


def nothing_guarded(control: Path, code: int, seconds: float) -> str | None:
    """Returns a line about a run in which there was nothing to guard; None if there was.

    Args:
        control: The folder with the notes of the run.
        code: The exit code of the command.
        seconds: How long the command ran.
    """
    if not any(control.glob(f"{ATTACHED}*")):
        unguarded = processes(control, UNGUARDED)
        if unguarded:
            return f"nothing was guarded: process {min(unguarded)} could not be reached"
        return "nothing was guarded: no Python process that imports torch was seen"
    stepped = any(control.glob(f"{STEPPED}*")) or any(control.glob(f"{STEPS}*"))
    if stepped or code != 0 or seconds <= _TRAINS:
        return None
    return (
        "torch was imported, but no training step was seen (no backward and no optimizer step), "
        "so nothing was guarded"
    )


def environment(options: Options) -> dict[str, str]:
    """Returns the environment in which Python processes find nanguard."""
    home = Path(__file__).resolve().parents[1]
    path = os.environ.get("PYTHONPATH")
    inherited = dict(os.environ)
    if options.track:
        inherited[TRACK] = ",".join(options.track)
    if TRACK in inherited:
        inherited.setdefault(TRACK_DIR, str(Path(options.incidents) / TRACKERS))
    if options.explain_seconds is not None:
        inherited[lab.VARIABLE] = repr(options.explain_seconds)
    return {
        **inherited,
        VARIABLE: options.to_text(),
        HOME: str(home),
        "PYTHONPATH": BOOT if not path else os.pathsep.join([BOOT, path]),
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
    control = Path(options.control)
    say = partial(_say, options=options)
    with noticed(control, BOOT, say), _forwarded_signals(process, control):
        while True:
            try:
                code = wait_for(process) if options.recover else process.wait()
                break
            except KeyboardInterrupt:
                # A terminal tells the command, too; how it ends is its own business.
                (control / INTERRUPTED).touch()
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


def _interrupted(options: Options) -> None:
    """Leaves word that the user wants an end, so that nothing is started again."""
    Path(options.control, INTERRUPTED).touch()
    _say("interrupted; what is not explained by now stays as it is", options)


def _explain_the_rest(paths: list[Path], options: Options) -> None:
    """Runs the command again for the first incident, if that can show more than its replay did."""
    from nanguard.run import again

    first, found = paths[0], _read(paths[0])
    if found is None or not _is_replayable(found):
        return
    if found["replay"]["verdict"] != "not-replayed" and not found["replay"].get("more"):
        return
    if not again.fits(found, options.explain_seconds):
        return
    if not again.runs_only_python(options.command) or not again.is_held_back():
        return
    sign_of_life = SignOfLife(quiet=options.quiet)
    show = partial(sign_of_life.show, "running the command once more to find out why")
    try:
        again.explain(
            first.parent, seconds=options.explain_seconds, beat=show, command=options.command
        )
    except KeyboardInterrupt:
        _interrupted(options)
    except IncidentError:
        pass  # what to do about it is said below
    finally:
        sign_of_life.end("the second run ended")


def _is_replayable(found: Incident) -> bool:
    """Returns whether ``nanguard replay --explain`` could explain an incident."""
    symptom = found.get("symptom") or {}
    # A second run looks for a step that an optimizer was about to make.
    other = found.get("by_script") or symptom.get("during") or symptom.get("kind") == "spike"
    return not other and bool(found["run"]["ranks"] == 1)


def _tell(paths: list[Path]) -> None:
    """Says, for each incident, what was found out; of those that were not explained, one."""
    left: list[Path] = []
    for path in paths:
        found = _read(path)
        if found is None:
            continue
        if found.get("cause"):
            # What was explained in place was told at once.
            if found["replay"].get("method") != "in-place":
                _print(outcome_line(found, path.parent))
        elif _is_replayable(found):
            left.append(path)
    found = _read(left[0]) if left else None
    if found is not None:
        why = found["replay"].get("why") or "the step was not replayed"
        more = f" (as are {len(left) - 1} more)" if len(left) > 1 else ""
        _print(
            f"nanguard: step {found['step']} is not explained{more}: {why}\n"
            f"          nanguard replay --explain {_short(left[0].parent)}"
        )


def outcome_line(found: Incident, folder: Path) -> str:
    """Returns what was found out about an incident, and the command that tells more.

    Args:
        found: The incident, with a cause.
        folder: Where it is.
    """
    cause = found["cause"]
    # A second run that came to the step would find the same once more.
    replay = found["replay"]
    final = replay.get("method") == "second-run" and replay["verdict"] != "not-replayed"
    again = cause.get("code") == "unknown" and _is_replayable(found) and not final
    command = "replay --explain" if again else "explain"
    fix = f"\n          nanguard fix {_short(folder)}" if is_fixable(found) else ""
    return f"nanguard: {in_a_line(found)}\n          nanguard {command} {_short(folder)}{fix}"


def _print(text: str) -> None:
    tell_user(text)


def _say(text: str, options: Options) -> None:
    if not options.quiet:
        _print(f"nanguard: {text}")


def _short(path: Path) -> str:
    with contextlib.suppress(ValueError):
        path = path.relative_to(Path.cwd())
    return shlex.quote(str(path))


def _read(path: Path) -> Incident | None:
    """Returns an incident of this run; None if the file is not one."""
    from nanguard import incident

    try:
        found = incident.read(path)
    except IncidentError:
        return None
    return found if {"run", "replay", "step", "rank"} <= set(found) else None


# Seconds between two looks at the folder of incidents.
_LOOK = 1.0
# Seconds that the explanation of an incident is waited for.
_EXPLAINING = 90.0


class Alerting:
    """Looks for incidents while a command runs, and sends them.

    Args:
        alerts: Where alerts go; None for nowhere.
        folder: Where the incidents of the run are written.
        command: The command.
    """

    def __init__(self, alerts: Alerts | None, folder: Path, command: Sequence[str]) -> None:
        self._alerts = alerts
        self._folder = folder
        self._run = " ".join(hidden_words(command))[:200]
        self._known = set(folder.glob(f"*/{incidents.NAME}"))
        self._waiting: dict[Path, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="nanguard-alerting", daemon=True)

    def __enter__(self) -> Alerting:
        if self._alerts is not None:
            self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def ended(self, code: int, *, stopped: str | None) -> None:
        """Sends what is left, and that the run has ended, if it has ended badly.

        Args:
            code: The exit code of the command.
            stopped: Why the guard ended it; None if it did not.
        """
        self.__exit__()
        if self._alerts is None:
            return
        self._look(last=True)
        if stopped is not None:
            text = (
                f"the guard stopped the run: {stopped}" if stopped else "the guard stopped the run"
            )
            self._alerts.send(Alert("stopped", text, self._run, urgent=True))
        elif code:
            text = f"the run ended with exit code {code}"
            self._alerts.send(Alert("ended", text, self._run, urgent=True))

    def _look_on(self) -> None:
        while not self._over.wait(_LOOK):
            self._look()

    def _look(self, *, last: bool = False) -> None:
        new = sorted(set(self._folder.glob(f"*/{incidents.NAME}")) - self._known)
        self._known.update(new)
        now = time.monotonic()
        self._waiting |= dict.fromkeys(new, now)
        for path, since in list(self._waiting.items()):
            try:
                found = incidents.read(path)
            except IncidentError:  # counted as another one of a known fault, and gone
                del self._waiting[path]
                continue
            if last or _is_explained(found) or now - since > _EXPLAINING:
                del self._waiting[path]
                self._send(found, path.parent)

    def _send(self, found: Incident, folder: Path) -> None:
        cause = found.get("cause") or {}
        step = found.get("step")
        said = in_a_line(found) or f"step {step}: {symptom(found.get('symptom') or {})}"
        advice = f"nanguard explain {shlex.quote(str(folder))}"
        kind = str(cause.get("code") or "bad-step")
        number = step if isinstance(step, int) else None
        if self._alerts is not None:
            self._alerts.send(Alert(kind, said, self._run, step=number, advice=advice))


def _is_explained(found: Incident) -> bool:
    return bool(found.get("cause"))
