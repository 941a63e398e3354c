"""Says what happens, once, everywhere it belongs: log, record, trackers, summary, callback."""

from __future__ import annotations

import logging
import queue
import time
from typing import TYPE_CHECKING, Any

from nanguard.findings import Severity
from nanguard.guard import events
from nanguard.guard.policy import Action
from nanguard.guard.summary import Event, Summary
from nanguard.record import RunRecord
from nanguard.trackers.tracker import incident_line

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from nanguard.findings import Finding, Kind
    from nanguard.guard.judge import Reading
    from nanguard.trackers import Trackers

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
        self, run_dir: Path | None, *, first: bool, on_event: Callable[[Event], None] | None
    ) -> None:
        self.summary = Summary()
        self.record: RunRecord | None = None
        self.trackers: Trackers | None = None
        self._first = first
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
    ) -> Event:
        """Reports an event.

        Args:
            finding: What happened.
            action: What was done about it.
            reason: Why.
            quiet: Whether the log has a line about all of its kind, and needs none of its own.
        """
        event = Event(finding, action, reason)
        self.summary.count(event)
        if self._first and not quiet:
            log.log(_LEVELS[finding.severity], "%s", event)
        if self.record is not None:
            self.record.event(event.to_json())
        if self.trackers is not None:
            self.trackers.event(event.to_json())
        if self._on_event is not None:
            self._on_event(event)
        return event

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
        """Tells the trackers where an incident was written."""
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
