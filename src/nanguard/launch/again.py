"""Runs the command of an incident a second time, up to the step that went bad."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from nanguard import incident as incidents
from nanguard.errors import IncidentError
from nanguard.launch.command import environment
from nanguard.launch.options import Options
from nanguard.launch.trust import is_ours

# A run that took longer than this until the step is not repeated without being asked.
SHORT = 60.0


def replay(
    folder: Path,
    *,
    precision: str | None = None,
    without: tuple[int, ...] = (),
    table: bool = False,
    seconds: float = 600.0,
) -> dict[str, Any]:
    """Replays the step of an incident once; returns what came of it.

    Args:
        folder: The incident.
        precision: ``float32`` or ``float64`` instead of narrower types.
        without: Samples of the batch to be replaced by a good one.
        table: Whether to return every operation.
        seconds: How long it may take.
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
        said = _run(incidents.read(folder), folder, again, scratch, seconds)
        if not answer.exists():
            raise IncidentError(
                "the command did not come to the step again.",
                where=str(folder),
                do=f"Run it by hand to see why. It said at the end: {said[-300:] or 'nothing'}",
            )
        told: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return told


def explain(folder: Path, *, seconds: float) -> None:
    """Explains an incident that could not be replayed while its run went on."""
    with tempfile.TemporaryDirectory(prefix="nanguard-replay-") as scratch:
        again = {"mode": "explain", "folder": str(folder.absolute())}
        _run(incidents.read(folder), folder, again, scratch, seconds)


def command_of(incident: dict[str, Any], folder: Path) -> tuple[list[str], Path]:
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


def is_trusted(incident: dict[str, Any], folder: Path) -> bool:
    """Returns whether the command of an incident is one that this user has run."""
    command, place = command_of(incident, folder)
    return is_ours(command, str(place), incident["run"].get("signature"))


def _run(
    incident: dict[str, Any], folder: Path, again: dict[str, Any], scratch: str, seconds: float
) -> str:
    command, place = command_of(incident, folder)
    options = Options(
        incidents=str(folder.absolute().parent),
        control=scratch,
        command=tuple(command),
        folder=str(place),
        quiet=True,
        patience=seconds,
        again=again,
    )
    try:
        done = subprocess.run(  # noqa: S603 - the command of the run, which the user started
            command,
            cwd=place,
            env=environment(options),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds + 60,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "nothing, it took too long"
    return done.stderr or f"(exit code {done.returncode}, {os.path.basename(command[0])})"  # noqa: PTH119
