"""Weights & Biases: rows and alerts, in the user's run or in an offline run of our own."""

from __future__ import annotations

import importlib
import os
from typing import Any, ClassVar

from nanguard.trackers.tracker import (
    EVENT,
    PREFIX,
    STEP,
    Alarm,
    Step,
    TrackedEvent,
    TrackedPlace,
    Tracker,
)

_LEVELS = {"info": "INFO", "warn": "WARN", "error": "ERROR"}
_BAD_STEPS = PREFIX + "bad_steps"
# Bad steps in words that are kept for the summary.
_MOST_BAD_STEPS = 1000


class WandB(Tracker):
    """Writes to W&B.

    A row belongs to whoever commits it. In a run of our own that is one row per step. In the
    user's run we only add to the row that the user is about to commit: a step of ours that
    pushed theirs ahead would make W&B refuse what they log next. A number that is not finite
    stays in that row until it is committed, and is listed in the run's summary.
    """

    name: ClassVar[str] = "wandb"
    modules: ClassVar[tuple[str, ...]] = ("wandb",)

    def __init__(self, place: TrackedPlace) -> None:
        super().__init__(place)
        self._run: Any = None
        self._adopted = False
        self._alarm = Alarm()
        self._last = 0
        self._bad: list[str] = []
        self._kept: dict[str, float] = {}
        self._row = -1

    def adopt(self) -> None:
        """Notes the user's run."""
        self._run = importlib.import_module("wandb").run
        self._adopted = self._run is not None

    def start(self) -> None:
        """Begins an offline run, unless the environment asks for another kind."""
        if self._adopted:
            self._run.define_metric(PREFIX + "*", step_metric=STEP)
            return
        wandb = importlib.import_module("wandb")
        self.place.folder.mkdir(parents=True, exist_ok=True)
        settings = wandb.Settings(
            console="off", silent=True, x_disable_stats=True, init_timeout=60.0
        )
        self._run = wandb.init(
            dir=os.environ.get("WANDB_DIR") or str(self.place.folder),
            mode=os.environ.get("WANDB_MODE") or "offline",
            project=os.environ.get("WANDB_PROJECT") or "nanguard",
            name=os.environ.get("WANDB_NAME") or self.place.name,
            # Not the global run: one that the user starts later is theirs alone.
            reinit="create_new",
            settings=settings,
        )

    def step(self, step: Step) -> None:
        """Writes a step."""
        if step.bad:
            self._bad = [*self._bad, step.in_words()][-_MOST_BAD_STEPS:]
            self._run.summary[_BAD_STEPS] = self._bad
        self._last = max(step.step, self._last)
        self._log({STEP: step.step, **step.numbers}, step.bad)

    def event(self, event: TrackedEvent) -> None:
        """Writes an event into the row of its step, and raises an alert."""
        self._log({EVENT: event.text}, {})
        text = self._alarm.text(event)
        if text is not None:
            self._run.alert(title=event.title, text=text, level=_LEVELS[event.level])

    def finish(self) -> None:
        """Ends the run if it is our own."""
        if self._alarm.held:
            self._run.summary[PREFIX + "alerts_held_back"] = self._alarm.held
        if not self._adopted:
            self._run.finish()

    def _log(self, row: dict[str, Any], bad: dict[str, float]) -> None:
        if not self._adopted:
            # W&B would drop a row whose step lies behind the last one.
            self._run.log(row, step=self._last)
            return
        if self._kept and self._run.step != self._row:
            self._kept = {}
        if bad and not self._kept:
            self._row = self._run.step
        self._kept |= bad
        self._run.log({**row, **self._kept}, commit=False)
