"""Says what happens, once, everywhere it belongs: log, record, trackers, summary, callback."""

from __future__ import annotations

import logging
import queue
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from nanguard.findings import Severity
from nanguard.guard import events
from nanguard.guard.policy import Action
from nanguard.record import RunRecord
from nanguard.trackers.tracker import incident_line

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from nanguard.findings import Finding, Kind
    from nanguard.guard.verdicts import Reading
    from nanguard.trackers import Trackers


# Events kept in memory; all of them are in events.jsonl.
_KEPT = 200


@dataclass(frozen=True, slots=True)
class WrittenIncident:
    """The incident of a bad step, as far as it is known.

    Attributes:
        folder: Where it lies.
        cause: The code of its cause; empty if that was not found.
        sentence: What happened, with the line; empty if that was not found.
    """

    folder: Path
    cause: str = ""
    sentence: str = ""


@dataclass(frozen=True, slots=True)
class Event:
    """A finding, and what the guard did about it.

    Attributes:
        finding: What was found.
        action: What was done; ``step`` where the step was applied all the same.
        reason: Why this rung of the ladder.
        incident: The incident of the step; None without one.
        tells: Whether this is the rank that tells others of it.
    """

    finding: Finding
    action: Action
    reason: str = ""
    incident: WrittenIncident | None = None
    tells: bool = True

    def to_json(self) -> dict[str, Any]:
        """Returns the event as a line of ``events.jsonl``."""
        out = {"action": self.action.value, **self.finding.to_json()}
        return {**out, "reason": self.reason} if self.reason else out

    @property
    def done(self) -> str:
        """What was done, and why, as the end of a sentence; empty for a step that was applied."""
        if self.action is Action.STEP:
            return ""
        return f" -> {_DONE[self.action]}" + (f" ({self.reason})" if self.reason else "")

    def __str__(self) -> str:
        at = "" if self.finding.step is None else f"step {self.finding.step}: "
        place = self.finding.where
        where = f" [{place}]" if place and place not in self.finding.message else ""
        return f"{at}{self.finding.message}{where}{self.done}"


_DONE = {
    Action.OVERFLOW: "left to the loss scaler",
    Action.SKIP: "batch skipped",
    Action.CUT_LR: "batch skipped, learning rate cut",
    Action.ROLLBACK: "rolled back to the last good snapshot",
    Action.STOP: "stopped",
}


@dataclass(slots=True)
class Summary:
    """Counts of everything the guard did. Nothing it does is missing here.

    Attributes:
        steps: Steps that were tried.
        applied: Steps that changed the weights.
        skipped: Steps whose batch was dropped.
        rerun: Steps that ran again because they came after a bad one before it was noticed.
        overflows: Steps that the GradScaler skipped by itself.
        lr_cuts: How often the learning rate was cut.
        rollbacks: How often the run was rolled back.
        lost_updates: Updates that rollbacks undid.
        warnings: Findings that changed nothing.
        snapshots: Good snapshots taken.
        events: The latest events.
    """

    steps: int = 0
    applied: int = 0
    skipped: int = 0
    rerun: int = 0
    overflows: int = 0
    lr_cuts: int = 0
    rollbacks: int = 0
    lost_updates: int = 0
    warnings: int = 0
    snapshots: int = 0
    events: list[Event] = field(default_factory=list)

    def count(self, event: Event) -> None:
        """Takes in an event."""
        self.events.append(event)
        del self.events[:-_KEPT]
        if event.action in (Action.STEP, Action.OVERFLOW):
            self.warnings += event.finding.severity is not Severity.INFO
            return
        self.skipped += 1
        self.lr_cuts += event.action is Action.CUT_LR
        self.rollbacks += event.action is Action.ROLLBACK

    def counts(self) -> dict[str, int]:
        """Returns the numbers by name."""
        counts = asdict(self)
        del counts["events"]
        return counts

    def load_counts(self, counts: dict[str, int]) -> None:
        """Continues from numbers that ``counts`` returned."""
        for name, value in counts.items():
            setattr(self, name, value)

    def __str__(self) -> str:
        head = (
            f"nanguard: {self.steps} steps, {self.applied} applied, {self.skipped} skipped, "
            f"{self.overflows} overflows, {self.lr_cuts} LR cuts, {self.rollbacks} rollbacks, "
            f"{self.warnings} warning{'' if self.warnings == 1 else 's'}"
        )
        return "\n".join([head, *(f"  {event}" for event in self.events)])


log = logging.getLogger("nanguard")

_LEVELS = {
    Severity.ERROR: logging.WARNING,
    Severity.WARNING: logging.WARNING,
    Severity.INFO: logging.INFO,
}


class Journal:
    """Keeps the log of a run.

    Attributes:
        summary: The counts so far.
        record: The run folder; None without one, and on all ranks but the first.
        trackers: Where else the run is written to; None for nowhere.
        losses: The sum and the number of the losses of this epoch's applied steps.
    """

    def __init__(
        self,
        run_dir: Path | None,
        *,
        first: bool,
        tells: bool = True,
        on_event: Callable[[Event], None] | None,
    ) -> None:
        self.summary = Summary()
        self.record: RunRecord | None = None
        self.trackers: Trackers | None = None
        self._first = first
        self._tells = tells
        self._on_event = on_event
        self._from_threads: queue.SimpleQueue[Finding] = queue.SimpleQueue()
        self.losses = [0.0, 0.0]
        if run_dir is not None and first:
            self.record = RunRecord(run_dir, on_failure=self.failure(events.RECORD_FAILED))

    def say(
        self,
        finding: Finding,
        action: Action = Action.STEP,
        reason: str = "",
        *,
        quiet: bool = False,
    ) -> None:
        """Writes an event down, and calls back with it.

        Args:
            finding: What happened.
            action: What was done about it.
            reason: Why.
            quiet: Whether the log has a line about all of its kind, and needs none of its own.
        """
        self.call_back(self.note(finding, action, reason, quiet=quiet))

    def note(
        self, finding: Finding, action: Action, reason: str = "", *, quiet: bool = False
    ) -> Event:
        """Writes an event down wherever it belongs; returns it.

        Args:
            finding: What happened.
            action: What was done about it.
            reason: Why.
            quiet: Whether the log has a line about all of its kind, and needs none of its own.
        """
        event = Event(finding, action, reason, tells=self._tells)
        self.summary.count(event)
        if self._first and not quiet:
            log.log(_LEVELS[finding.severity], "nanguard: %s", event)
        if self.record is not None:
            self.record.event(event.to_json())
        if self.trackers is not None:
            self.trackers.event(event.to_json())
        return event

    def call_back(self, event: Event) -> None:
        """Calls the user's function with an event, once all is known of it."""
        if self._on_event is not None:
            self._on_event(event)

    def failure(self, kind: Kind) -> Callable[[str], None]:
        """Returns a function with which another thread can report that it failed."""
        return lambda what: self._from_threads.put(kind(f"could not write {what}"))

    def hear_threads(self) -> None:
        """Reports what other threads had to say."""
        while not self._from_threads.empty():
            self.say(self._from_threads.get())

    def step(
        self,
        reading: Reading,
        action: Action,
        *,
        step: int,
        update: int,
        epoch: int,
        lr: float | None,
    ) -> None:
        """Adds a line about a step whose verdict is known."""
        self.hear_threads()
        if action is Action.STEP:
            self.losses[0] += reading.loss
            self.losses[1] += 1
        if self.record is None and self.trackers is None:
            return
        line: dict[str, Any] = {
            "step": step,
            "update": update,
            "epoch": epoch,
            "loss": reading.loss,
            "terms": reading.terms or None,
            "grad_norm": reading.grad_norm,
            "lr": lr,
            "scale": reading.scale,
            "action": action.value,
            "time": round(time.time(), 3),
        }
        if self.record is not None:
            self.record.metric(line)
        if self.trackers is not None:
            self.trackers.metric(line)

    def incident(self, step: int, folder: Path) -> None:
        """Lets the trackers know where an incident was written."""
        if self.trackers is not None:
            self.trackers.event(incident_line(step, folder))

    def take_losses(self) -> list[float]:
        """Returns the sum and the number of the losses of applied steps, and starts anew."""
        losses, self.losses = self.losses, [0.0, 0.0]
        return losses

    def epoch(self, epoch: int, metrics: dict[str, Any]) -> None:
        """Adds a row about an epoch."""
        if self.record is not None:
            self.record.epoch({"epoch": epoch, **metrics})

    def go_back(self, step: int, epoch: int) -> int:
        """Takes steps that will be made again out of the record; returns how many.

        Args:
            step: The step that comes next.
            epoch: How many epochs were over before it.
        """
        return 0 if self.record is None else self.record.go_back(step, epoch)

    def flush(self) -> None:
        """Returns when the record is on the disk as far as the run has come."""
        if self.record is not None:
            self.record.flush()

    def close(self) -> None:
        """Writes what is left."""
        if self.trackers is not None:
            self.trackers.close()
        self.hear_threads()
        if self.record is not None:
            self.record.close()
