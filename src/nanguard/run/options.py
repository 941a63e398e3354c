"""What ``nanguard run`` was told, and how the processes below it get to know."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from typing import Any

VARIABLE = "NANGUARD_RUN"
HOME = "NANGUARD_HOME"


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The options of one ``nanguard run``.

    Attributes:
        incidents: The folder for incidents.
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
            many as ``nanguard.diagnose.limits`` allows.
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
