"""Trackio: rows and alerts, in the user's run or in one of our own."""

from __future__ import annotations

import importlib
import os
from typing import Any, ClassVar

from nanguard.trackers.tracker import EVENT, STEP, Alarm, Step, TrackedEvent, TrackedPlace, Tracker


class Trackio(Tracker):
    """Writes to Trackio, which keeps its files where ``trackio show`` looks for them."""

    name: ClassVar[str] = "trackio"
    modules: ClassVar[tuple[str, ...]] = ("trackio", "trackio.context_vars")

    def __init__(self, place: TrackedPlace) -> None:
        super().__init__(place)
        self._run: Any = None
        self._adopted = False
        self._alarm = Alarm()
        self._last = 0

    def adopt(self) -> None:
        """Notes the user's run, which is known in their thread only."""
        self._run = importlib.import_module("trackio.context_vars").current_run.get()
        self._adopted = self._run is not None

    def start(self) -> None:
        """Begins a run. It is the current one in this thread only."""
        if not self._adopted:
            self._run = importlib.import_module("trackio").init(
                project=os.environ.get("TRACKIO_PROJECT") or "nanguard",
                name=self.place.name,
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def step(self, step: Step) -> None:
        """Writes a step."""
        self._last = step.step
        self._run.log({STEP: step.step, **step.numbers}, step=step.step)

    def event(self, event: TrackedEvent) -> None:
        """Adds an event to its step, and raises an alert."""
        self._run.log({EVENT: event.text}, step=self._last if event.step is None else event.step)
        text = self._alarm.text(event)
        if text is not None:
            level = importlib.import_module("trackio").AlertLevel(event.level)
            self._run.alert(title=event.title, text=text, level=level)

    def finish(self) -> None:
        """Ends the run if it is our own."""
        if not self._adopted:
            self._run.finish()
