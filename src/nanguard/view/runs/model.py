"""The one model of a run: curves, events, incidents, findings and what is known beside them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from operator import le, lt
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

    from nanguard.check.log.series import Column, Log


class Panel(str, Enum):
    """What a curve is shown with, in the order in which panels are shown."""

    LOSS = "Loss"
    TERMS = "Loss terms"
    GRAD_NORM = "Gradient norm"
    RATE = "Learning rate"
    SCALE = "Loss scale"
    ACCURACY = "Accuracy"


class Axis(str, Enum):
    """What a run's points are counted by."""

    STEP = "step"
    EPOCH = "epoch"
    ENTRY = "entry"


@dataclass(slots=True)
class Curve:
    """One number over a run. What it holds is shared with the log it came from, and grows with it.

    Attributes:
        name: Its name, as the log has it.
        panel: What it is shown with.
        xs: The step, epoch or entry of each point, in the order in which they were written.
        values: The numbers, non-finite ones included; as many as there are in ``xs``.
        evaluation: Whether it was measured on held-out data.
        rank: The rank that wrote it, where the log names it.
    """

    name: str
    panel: Panel
    xs: Sequence[float] | Column
    values: array[float]
    evaluation: bool = False
    rank: int | None = None

    def __len__(self) -> int:
        return min(len(self.xs), len(self.values))


class EventKind(str, Enum):
    """What happened."""

    NON_FINITE = "non-finite"
    SPIKE = "spike"
    SKIP = "skip"
    LR_CUT = "lr-cut"
    LR_RESTORED = "lr-restored"
    ROLLBACK = "rollback"
    RESTART = "restart"
    STOP = "stop"
    OVERFLOW = "overflow"
    INCIDENT = "incident"
    NOTE = "note"


@dataclass(slots=True)
class Event:
    """Something that happened at a step, or in a stretch of them.

    Attributes:
        kind: What.
        step: The step, on the axis of the run; None if it is not known.
        text: What was said about it.
        last: The last step, where several of a kind are told as one; else the same as ``step``.
        count: How many there were.
        severity: ``error``, ``warning`` or ``info``.
        reason: Why the guard did what it did.
        time: When, in seconds since 1970; None if it is not known.
        incident: Which of the run's incidents it is; None if it is none.
    """

    kind: EventKind
    step: float | None
    text: str
    last: float | None = None
    count: int = 1
    severity: str = "info"
    reason: str = ""
    time: float | None = None
    incident: int | None = None

    def __post_init__(self) -> None:
        if self.last is None:
            self.last = self.step


@dataclass(frozen=True, slots=True)
class Clock:
    """When some of the steps were made.

    Attributes:
        steps: Steps, in the order in which they were written.
        times: Seconds since 1970, one for each.
    """

    steps: Sequence[int] = ()
    times: Sequence[float] = ()

    @property
    def seconds(self) -> float | None:
        """How long the run took; None if it is not known, or the clock went back."""
        if len(self.times) < 2 or self.times[-1] < self.times[0]:
            return None
        return self.times[-1] - self.times[0]

    @property
    def steady(self) -> bool:
        """Whether each step has one time: there are two at least, and both only ever grow."""
        steps, times = self.steps, self.times
        grows = all(map(lt, steps, islice(steps, 1, None)))
        return len(steps) > 1 and grows and all(map(le, times, islice(times, 1, None)))

    def set_back(self) -> list[int]:
        """Returns the steps before which the clock was set back."""
        pairs = zip(self.times, self.times[1:], self.steps[1:], strict=False)
        return [step for before, now, step in pairs if now < before]


@dataclass(slots=True)
class Run:
    """Everything that is known about one run.

    Attributes:
        name: How it is called.
        path: Where it lies.
        axis: What its points are counted by.
        curves: Its numbers.
        events: What happened, by step.
        incidents: The incidents, as their files hold them, with the folder of each as ``folder``.
        findings: Findings, as the JSON of ``nanguard check`` has them.
        logs: The logs it was read from, for rules.
        clock: When some of its steps were made.
        configuration: Texts of configurations that lie beside it, by file name.
        environment: Versions, machine and command, where they were recorded.
        problems: What could not be read, and why; what else a reader has to know.
    """

    name: str
    path: str
    axis: Axis = Axis.STEP
    curves: list[Curve] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    incidents: list[dict[str, Any]] = field(default_factory=list)
    findings: list[dict[str, Any]] = field(default_factory=list)
    logs: list[Log] = field(default_factory=list)
    clock: Clock = field(default_factory=Clock)
    configuration: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def points(self) -> int:
        """How many numbers there are."""
        return sum(map(len, self.curves))

    def of(self, panel: Panel) -> list[Curve]:
        """Returns the curves of one panel."""
        return [curve for curve in self.curves if curve.panel is panel]

    def main(self) -> Curve | None:
        """Returns the curve that tells most: the loss of the training, if there is one."""
        for panel in (Panel.LOSS, Panel.TERMS, Panel.GRAD_NORM):
            own = [curve for curve in self.of(panel) if len(curve)]
            if own:
                return max(own, key=lambda curve: (not curve.evaluation, len(curve)))
        return next((curve for curve in self.curves if len(curve)), None)
