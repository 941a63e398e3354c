"""What every tracker is told about a run, and what it has to be able to do."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from nanguard.findings import name_of

if TYPE_CHECKING:
    from pathlib import Path

PREFIX = "nanguard/"
STEP = PREFIX + "step"
SKIPPED = PREFIX + "skipped"
NON_FINITE = PREFIX + "nonfinite_steps"
EVENT = PREFIX + "event"
# What a line of the run record calls a number, and what it is called in a tracker.
_NUMBERS = {"loss": "loss", "grad_norm": "grad_norm", "lr": "lr", "scale": "loss_scale"}
# The actions after which a batch counts; every other one dropped it.
_KEPT = ("step", "overflow")
# Seconds in which one title raises one alert.
_QUIET = 60.0
_LONGEST_TITLE = 63
_LONGEST_TEXT = 2000


@dataclass(frozen=True, slots=True)
class TrackedPlace:
    """Where a tracker writes if the user has no run of their own.

    Attributes:
        folder: A folder for files.
        name: How the run is called.
    """

    folder: Path
    name: str


@dataclass(frozen=True, slots=True)
class Step:
    """One step.

    Attributes:
        step: Its number.
        numbers: Its numbers by name, those that are not finite included.
        bad: Those that are not finite.
    """

    step: int
    numbers: dict[str, float]
    bad: dict[str, float]

    def in_words(self) -> str:
        """Returns what is not finite: ``7: loss=nan``."""
        values = ", ".join(
            f"{name.removeprefix(PREFIX)}={name_of(value)}" for name, value in self.bad.items()
        )
        return f"{self.step}: {values}"


@dataclass(frozen=True, slots=True)
class TrackedEvent:
    """Something that happened.

    Attributes:
        step: The step it is about; None if it is about none.
        title: What it is, in a few words.
        text: The same with everything that is known.
        level: How loud it is.
    """

    step: int | None
    title: str
    text: str
    level: Literal["info", "warn", "error"]


class Counting:
    """Makes steps of the lines of a run record, and counts those that were bad."""

    def __init__(self) -> None:
        self._skipped = 0
        self._non_finite = 0

    def step(self, line: dict[str, Any]) -> Step:
        """Returns the step that a line is about."""
        numbers = {
            name: float(line[key]) for key, name in _NUMBERS.items() if line.get(key) is not None
        }
        numbers |= {f"terms/{name}": float(v) for name, v in (line.get("terms") or {}).items()}
        lane = f"optimizer-{line['optimizer']}/" if line.get("optimizer") else ""
        numbers = {f"{PREFIX}{lane}{name}": value for name, value in numbers.items()}
        bad = {name: value for name, value in numbers.items() if not math.isfinite(value)}
        self._skipped += line.get("action", "step") not in _KEPT
        self._non_finite += bool(bad)
        numbers[SKIPPED] = float(self._skipped)
        numbers[NON_FINITE] = float(self._non_finite)
        return Step(int(line["step"]), numbers, bad)


def event_of(line: dict[str, Any]) -> TrackedEvent:
    """Returns the event that a line is about."""
    action = line.get("action", "step")
    step = line.get("step")
    done = "" if action == "step" else f" -> {action}"
    reason = f" ({line['reason']})" if line.get("reason") else ""
    where = f" [{line['where']}]" if line.get("where") else ""
    path = f"\n{line['path']}" if line.get("path") else ""
    text = f"{'' if step is None else f'step {step}: '}{line['message']}{where}{done}{reason}"
    level: Literal["info", "warn", "error"] = "warn"
    if action in ("rollback", "stop"):
        level = "error"
    elif line.get("severity") == "info":
        level = "info"
    title = f"nanguard: {line['name']}{done}"
    return TrackedEvent(step, title[:_LONGEST_TITLE], text[:_LONGEST_TEXT] + path, level)


def incident_line(step: int, folder: Path) -> dict[str, Any]:
    """Returns the event of an incident that was written."""
    return {
        "name": "incident",
        "severity": "info",
        "step": step,
        "message": f"incident written; nanguard explain {folder}",
        "path": str(folder),
    }


@dataclass(slots=True)
class Alarm:
    """Lets one alert of a kind through at a time, and counts the others."""

    _last: dict[str, float] = field(default_factory=dict)
    _held: Counter[str] = field(default_factory=Counter)

    def text(self, event: TrackedEvent) -> str | None:
        """Returns what an alert says; None if there is to be none now."""
        if event.level == "info":
            return None
        now = time.monotonic()
        last = self._last.get(event.title, -math.inf)
        if event.level == "warn" and now - last < _QUIET:
            self._held[event.title] += 1
            return None
        self._last[event.title] = now
        held = self._held.pop(event.title, 0)
        return f"{event.text}\n({held} more since the last alert)" if held else event.text

    @property
    def held(self) -> int:
        """How many alerts were not sent."""
        return sum(self._held.values())


class Tracker(ABC):
    """Writes a run to one place. All but ``adopt`` is called in a thread of the tracker's own.

    Attributes:
        name: How users call it.
        modules: What has to be imported for it, in the training thread.
        held: How many lines are held back to be written together.
    """

    name: ClassVar[str]
    modules: ClassVar[tuple[str, ...]]

    def __init__(self, place: TrackedPlace) -> None:
        self.place = place
        self.held = 0

    def adopt(self) -> None:  # noqa: B027 - not every library knows an active run
        """Notes the run that the user has started; called in the thread that trains."""

    @abstractmethod
    def start(self) -> None:
        """Begins a run where the user has none."""

    @abstractmethod
    def step(self, step: Step) -> None:
        """Writes a step."""

    @abstractmethod
    def event(self, event: TrackedEvent) -> None:
        """Writes an event."""

    def flush(self) -> None:  # noqa: B027 - most write at once
        """Writes what was held back to be written together."""

    @abstractmethod
    def finish(self) -> None:
        """Ends what was begun; a run of the user's goes on."""
