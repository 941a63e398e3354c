"""How ``nanguard run`` and the processes below it talk: its options, and the notes they leave.

Options travel in an environment variable. Notes are files in the control folder, named here and
nowhere else; behind each name stands the number of the process that has left it.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from nanguard.diagnose.lab import TRYING as TRYING
from nanguard.masking import hidden

if TYPE_CHECKING:
    from pathlib import Path

VARIABLE = "NANGUARD_RUN"
HOME = "NANGUARD_HOME"


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The options of one ``nanguard run``.

    Attributes:
        incidents: The folder for incidents.
        run_dir: The folder for the record of the run; None to keep none.
        control: A folder through which the processes tell the launcher what happened.
        command: The command.
        folder: Where it was started.
        signature: Says that it was this user who started it.
        on_bad: What to do about a bad step: skip, rollback or stop.
        max_bad: How many bad steps the run may meet; None for no such bound.
        spikes: What to do about a loss or gradient norm far above the usual: act, warn or off.
        trace: Whether a bad step is replayed and explained.
        quiet: Whether only the end of a run is worth a line.
        patience: How many seconds a second run that only replays a step may take.
        explain_seconds: How many seconds the explanation of one incident may take; None for as
            many as ``nanguard.diagnose.lab`` allows.
        again: What a second run of the command is for; None for the first.
        recover: Whether somebody is there to start the command again.
        track: Where else the run is written to.
        quarantine: Whether loaders leave out samples that were found bad.
        left_out: The samples that were known when the run began, as (data set, length, index);
            None for those that are listed on disk.
    """

    incidents: str
    control: str
    command: tuple[str, ...]
    folder: str
    run_dir: str | None = None
    signature: str | None = None
    on_bad: str = "skip"
    max_bad: int | None = None
    spikes: str = "warn"
    trace: bool = True
    quiet: bool = False
    patience: float = 90.0
    explain_seconds: float | None = None
    again: dict[str, Any] | None = None
    recover: bool = False
    track: tuple[str, ...] = ()
    quarantine: bool = False
    left_out: tuple[tuple[str, int, int], ...] | None = None

    def to_text(self) -> str:
        """Returns the options as the environment variable holds them."""
        return json.dumps(asdict(self))


def from_environment() -> Options | None:
    """Returns the options of the run this process belongs to; None outside of one."""
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    try:
        values = json.loads(text)
        tuples = {name: tuple(values[name]) for name in ("command", "track")}
        # The process may have another version of nanguard than the launcher.
        known = {field.name for field in fields(Options)}
        return Options(**{name: values[name] for name in values if name in known} | tuples)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


# Nanguard is in this process, which is about to import torch, if it is not just looking for it.
# Written by attach.py, read by unguarded.py. Empty.
REACHED = "reached-"
# Torch was imported, and this process is guarded from here on. A process that only starts others
# leaves none. Written by incident_writer.py. Empty.
ATTACHED = "attached-"
# The process has made its first step, or its first backward where there is no optimizer. Written
# by live.py, also for a script with a Guard of its own. Empty.
STEPPED = "stepped-"
# This process uses torch, and nanguard could not get into it. Written by unguarded.py, in the
# launcher. Empty.
UNGUARDED = "unguarded-"
# The guard has ended the run. Written by incident_writer.py. The reason.
STOPPED = "stopped-"

# TRYING ("trying-"): a replay of an explanation has begun, in a second run. Named after the
# incident's folder. Written by diagnose/session.py for each replay. JSON: until when it may go on.

# The notes of a run that may be recovered; heartbeat.py writes them and says what they hold.
STEPS = "steps-"
ENDED = "ended-"
RAISED = "raised-"
RATE = "rate-"
BAD = "bad-"

# The user, or the system, wants the run to end. Written by command.py. Empty, with no number.
INTERRUPTED = "interrupted"


def leave(control: Path, name: str, text: str = "") -> None:
    """Leaves a note; a folder that is gone or full must not end the run."""
    with contextlib.suppress(OSError):
        (control / name).write_text(hidden(text))


def processes(control: Path, kind: str) -> set[int]:
    """Returns the processes that have left a kind of note."""
    numbers = (path.name.removeprefix(kind) for path in control.glob(f"{kind}*"))
    return {int(number) for number in numbers if number.isdecimal()}
