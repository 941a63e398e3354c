"""Runs the command of an incident a second time, up to the step that went bad."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from nanguard import incident as incidents
from nanguard.diagnose import lab
from nanguard.errors import IncidentError
from nanguard.masking import HIDDEN, hidden
from nanguard.replay import landlock
from nanguard.replay.task import ReplayProgress
from nanguard.run.command import environment
from nanguard.run.control import Options
from nanguard.run.run_record import is_ours

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nanguard.incident import Incident

# A run that took more seconds than this up to the step is not repeated without being asked.
SHORT = 60.0
# Seconds between two looks at a second run.
_LOOK = 0.1
# Seconds that a command has between being asked to end and being ended.
_TO_END = 5.0
# Seconds that one replay may take if nobody has chosen a limit, and at least.
_ONE_REPLAY = 600.0
_SHELLS = {"sh", "bash", "dash", "zsh", "ksh", "fish", "make"}


def runs_only_python(command: Sequence[str]) -> bool:
    """Returns whether a command is one Python program, which can be run a second time.

    Whatever else a shell script does would happen a second time, too.

    Args:
        command: The command: ``python ...``, a console script such as ``yolo``, an executable file
            with Python in its first line, one of these behind ``env``, or ``uv run ...``.
    """
    words = list(command)
    if words and Path(words[0]).name == "env":
        words = _behind_env(words[1:])
    if not words:
        return False
    name = Path(words[0]).name
    if name == "uv":
        others = {Path(word).name for word in words[1:]}
        scripts = any(word.endswith(".sh") for word in others)
        return "run" in words[1:] and not others & _SHELLS and not scripts
    return name.startswith("python") or _is_console_script(words[0])


def _behind_env(words: list[str]) -> list[str]:
    """Returns the command behind ``env`` and what ``env`` sets; nothing if that is not plain."""
    while words and ("=" in words[0] or words[0] in ("-i", "-", "--ignore-environment", "-u")):
        words = words[2:] if words[0] == "-u" else words[1:]
    return [] if words and words[0].startswith("-") else words


def _is_console_script(name: str) -> bool:
    """Returns whether a program is a file that Python runs."""
    path = shutil.which(name)
    if path is None:
        return False
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            first, second = file.readline(4096), file.readline(4096)
    except OSError:
        return False
    if not first.startswith(b"#!"):
        return False
    # Installers write the second form where the path of Python is long or has a space in it.
    return b"python" in first or (second.startswith(b"'''exec' ") and b"python" in second)


def fits(incident: Incident, seconds: float | None) -> bool:
    """Returns whether a second run can explain an incident in its time.

    Args:
        incident: The incident.
        seconds: How long it may take; None for as long as such a run needs.
    """
    to_step = lab.seconds_to_step(incident)
    if seconds is None:
        return to_step <= SHORT
    return lab.limits_for(to_step, seconds).allows(to_step)


def replay(
    folder: Path,
    *,
    precision: str | None = None,
    without: tuple[int, ...] = (),
    table: bool = False,
    seconds: float | None = None,
    beat: Callable[[str], None] = lambda _how_far: None,
) -> dict[str, Any]:
    """Replays the step of an incident once; returns what came of it.

    Args:
        folder: The incident.
        precision: ``float32`` or ``float64`` instead of narrower types.
        without: Samples of the batch to be replaced by a good one.
        table: Whether to return every operation.
        seconds: How long it may take; None for ten minutes, or more if the run took long to get
            there or the machine is busy.
        beat: Called again and again while the command runs, with how far it is.
    """
    with tempfile.TemporaryDirectory(prefix="nanguard-replay-") as scratch:
        answer = Path(scratch, "answer.json")
        again = {
            "mode": "replay",
            "folder": str(folder.absolute()),
            "answer": str(answer),
            "precision": precision,
            "without": list(without),
            "table": table,
        }
        incident = incidents.read(folder)
        allowed = lab.limits_for(lab.seconds_to_step(incident), seconds)
        one = max(_ONE_REPLAY, allowed.replay) * lab.load_now()
        second = _SecondRun(incident, folder, again, Path(scratch), seconds)
        said = second.run(beat, patience=one if seconds is None else seconds)
        if not answer.exists():
            raise IncidentError(
                "the command did not come to the step again.",
                where=str(folder),
                do=f"{_without_secrets(incident)}Run it by hand to see why. It said at the end: "
                f"{hidden(said[-300:]) or 'nothing'}",
            )
        outcome: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return outcome


def explain(
    folder: Path,
    *,
    seconds: float | None = None,
    beat: Callable[[str], None] = lambda _how_far: None,
    command: Sequence[str] | None = None,
) -> None:
    """Explains an incident that could not be replayed while its run went on.

    Args:
        folder: The incident.
        seconds: How long all replays together may take; None for what the run and the machine
            need.
        beat: Called again and again while the command runs, with how far it is.
        command: The command, where it is known; the one in the incident has no secrets.

    Raises:
        IncidentError: The time is too short for any explanation.
    """
    incident = incidents.read(folder)
    to_step = lab.seconds_to_step(incident)
    if not lab.limits_for(to_step, seconds).allows(to_step):
        raise IncidentError(
            f"{seconds:g} s are not enough: the run took {to_step:.0f} s up to the step, and at "
            f"least {lab.FEWEST_REPLAYS:.0f} replays are needed.",
            where=str(folder),
            do=f"Allow more, such as --explain-seconds {lab.limits_for(to_step).total:.0f}, or "
            "leave the option out.",
        )
    with tempfile.TemporaryDirectory(prefix="nanguard-replay-") as scratch:
        again = {"mode": "explain", "folder": str(folder.absolute()), "control": scratch}
        _SecondRun(incident, folder, again, Path(scratch), seconds, command).run(beat)


def command_of(incident: Incident, folder: Path) -> tuple[list[str], Path]:
    """Returns the command of an incident and where it ran; refuses what cannot be run."""
    run = incident.get("run")
    command = run.get("command") if isinstance(run, dict) else None
    place = run.get("folder") if isinstance(run, dict) else None
    good = isinstance(command, list) and command and all(isinstance(c, str) for c in command)
    if not good or not isinstance(place, str) or not isinstance(run.get("ordinal"), int):  # type: ignore[union-attr]
        raise IncidentError(
            "the incident does not say which command it came from.",
            where=str(folder),
            do="Only incidents that `nanguard run` has written can be replayed.",
        )
    if run.get("ranks", 1) != 1:  # type: ignore[union-attr]
        raise IncidentError(
            f"the incident comes from a run with {run.get('ranks')} ranks, which cannot be "  # type: ignore[union-attr]
            "replayed from its folder.",
            where=str(folder),
            do="Run the command again under nanguard run: a step of several ranks is explained "
            "while the run goes on.",
        )
    if not Path(place).is_dir() or shutil.which(command[0]) is None:  # type: ignore[index]
        raise IncidentError(
            f"the command {command[0]!r} cannot be run in {place!r} any more.",  # type: ignore[index]
            where=str(folder),
            do="Replay it on the machine, and in the environment, that the run was on.",
        )
    return command, Path(place)  # type: ignore[return-value]


def _without_secrets(incident: Incident) -> str:
    """Returns a sentence about a command whose secrets were not kept."""
    if not any(HIDDEN in str(word) for word in incident["run"]["command"]):
        return ""
    return f"Keys and passwords are not kept: the command got {HIDDEN!r} for them. "


def is_held_back() -> bool:
    """Returns whether a second run of a command is kept from writing to anybody's files."""
    return landlock.version() > 0


def is_trusted(incident: Incident, folder: Path) -> bool:
    """Returns whether the command of an incident is one that this user has run."""
    command, place = command_of(incident, folder)
    return is_ours(command, str(place), incident["run"].get("signature"))


class _SecondRun:
    """The command of an incident, started once more, and ended when it hangs."""

    def __init__(
        self,
        incident: Incident,
        folder: Path,
        again: dict[str, Any],
        scratch: Path,
        seconds: float | None,
        command: Sequence[str] | None = None,
    ) -> None:
        kept, self._place = command_of(incident, folder)
        self._command = kept if command is None else list(command)
        self._to_step = lab.seconds_to_step(incident)
        self._target = incident["run"]["ordinal"]
        self._progress = scratch / "progress"
        self._folder = folder.absolute()
        self._again = again
        self._scratch = scratch
        self._seconds = seconds
        # What loaders left out in the run, they leave out here: their batches are the same then.
        self._left_out = incident["run"].get("left_out") or []

    def run(self, beat: Callable[[str], None], *, patience: float = 0.0) -> str:
        """Runs the command; returns what it said at its end.

        Args:
            beat: Called again and again meanwhile, with how far it is.
            patience: Seconds that the replay of a step may take, if nothing more is to be done.
        """
        options = Options(
            incidents=str(self._folder.parent),
            control=str(self._scratch),
            command=tuple(self._command),
            folder=str(self._place),
            quiet=True,
            patience=patience,
            explain_seconds=self._seconds,
            again={**self._again, "held": is_held_back(), "progress": str(self._progress)},
            quarantine=bool(self._left_out),
            left_out=tuple(self._left_out),
        )
        ReplayProgress.create(self._progress)
        said = self._scratch / "said"
        with said.open("wb") as file:
            process = self._start(options, file)
            try:
                in_time = self._wait(process, beat, patience)
            finally:
                _end(process)
        if not in_time:
            return "nothing, it took too long"
        text = said.read_text(encoding="utf-8", errors="replace")
        return text or f"(exit code {process.returncode}, {Path(self._command[0]).name})"

    def _start(self, options: Options, said: IO[bytes]) -> subprocess.Popen[bytes]:
        own = self._scratch / "tmp"
        own.mkdir()
        caches = {"TMPDIR": str(own), "TRITON_CACHE_DIR": str(own)}
        try:
            return subprocess.Popen(  # noqa: S603 - the command of the run, which the user started
                self._command,
                cwd=self._place,
                env={**environment(options), **caches},
                preexec_fn=self._hold_back if is_held_back() else None,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=said,
                start_new_session=True,
            )
        except subprocess.SubprocessError as error:
            raise IncidentError(
                "the command could not be kept from writing files, and was not started.",
                where=str(self._folder),
                do="Look whether Landlock is forbidden here, as it is in some containers.",
            ) from error

    def _hold_back(self) -> None:
        """Lets the command, and all it starts, write only where nothing of the user's lies."""
        landlock.confine([self._scratch, self._folder])

    def _wait(
        self, process: subprocess.Popen[bytes], beat: Callable[[str], None], patience: float
    ) -> bool:
        """Waits until the command ends; returns whether it did before it had to be ended."""
        began = time.monotonic()
        # What comes before the first replay is the script up to where it imports torch.
        start = lab.limits_for(self._to_step, self._seconds).total + patience
        note = self._scratch / f"{lab.TRYING}{self._folder.name}"
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK)
                return True
            beat(ReplayProgress.in_words(self._progress, self._target))
            until = lab.read_note(note)
            if time.monotonic() >= lab.deadline(began, start, until, lab.load_now()):
                return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a command, if it has not ended, and whatever it has left in its group."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        if process.poll() is None:
            # A launcher whose workers have groups of their own ends them.
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(_TO_END)
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
