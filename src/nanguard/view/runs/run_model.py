"""The one model of a run: curves, events, incidents, findings, and what happened in it."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from operator import le, lt
from typing import TYPE_CHECKING, Any

from nanguard.check.log.grammar import loads
from nanguard.findings import name_of

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from nanguard.check.log.series import Log, SeriesColumn
    from nanguard.incident import Incident


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
    xs: Sequence[float] | SeriesColumn
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
class RunEvent:
    """Something that happened at a step, or in a stretch of them.

    Attributes:
        kind: What.
        step: The step, on the axis of the run; None if it is not known.
        text: What was said about it.
        last: The last step, where several of a kind are shown as one; else the same as ``step``.
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
    events: list[RunEvent] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
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


# Bytes of a line, and lines of a file, that are read.
_LONGEST_LINE = 1 << 16
_MOST_READ = 300_000
# Events beyond this are shown together with their neighbours.
MOST_EVENTS = 2000
# Characters of a message that are kept.
_LONGEST_TEXT = 500
_BY_ACTION = {
    "skip": EventKind.SKIP,
    "cut-lr": EventKind.LR_CUT,
    "rollback": EventKind.ROLLBACK,
    "stop": EventKind.STOP,
    "overflow": EventKind.OVERFLOW,
}
_BY_NAME = {
    "non-finite-loss": EventKind.NON_FINITE,
    "non-finite-gradient": EventKind.NON_FINITE,
    "non-finite-parameter": EventKind.NON_FINITE,
    "loss-spike": EventKind.SPIKE,
    "grad-norm-spike": EventKind.SPIKE,
    "lr-restored": EventKind.LR_RESTORED,
    "resumed": EventKind.RESTART,
}


def read_events(path: Path) -> tuple[list[RunEvent], list[str]]:
    """Returns the guard's events, and what could not be read.

    Raises:
        OSError: It cannot be read.
    """
    return _read_some(path, _event)


def read_lineage(path: Path) -> tuple[list[RunEvent], list[str]]:
    """Returns the restarts of a run, and what could not be read.

    Raises:
        OSError: It cannot be read.
    """
    return _read_some(path, _restart)


def _read_some(
    path: Path, told: Callable[[dict[str, Any]], RunEvent]
) -> tuple[list[RunEvent], list[str]]:
    """Returns what the first lines of a file tell, and what could not be read."""
    events, problems, broken = [], [], 0
    for number, record in enumerate(_records(path), 1):
        if number > _MOST_READ:
            problems.append(f"only the first {_MOST_READ} lines of {path.name} were read")
            break
        if record is None:
            broken += 1
            continue
        events.append(told(record))
    if broken:
        problems.append(_torn(broken, path))
    return events, problems


def _torn(lines: int, path: Path) -> str:
    what = "one line" if lines == 1 else f"{lines} lines"
    return f"{what} of {path.name} could not be read: not a complete JSON object"


def events_of_incidents(incidents: Sequence[Incident]) -> list[RunEvent]:
    """Returns an event for each incident."""
    return [
        RunEvent(
            EventKind.INCIDENT,
            _step(incident.get("step")),
            _summary(incident),
            severity="error",
            reason=str(_field(incident, "action", "reason") or "")[:_LONGEST_TEXT],
            incident=place,
        )
        for place, incident in enumerate(incidents)
    ]


def events_of_log(log: Log) -> list[RunEvent]:
    """Returns what a log says in words."""
    return [
        RunEvent(
            EventKind.NON_FINITE if note.role.value != "loss scale" else EventKind.NOTE,
            note.step,
            note.said,
            severity="error",
        )
        for note in log.notes
        if note.step is not None
    ]


def events_of_restarts(curve: Curve, restarts: Sequence[int]) -> list[RunEvent]:
    """Returns an event for each place at which the steps of a run begin anew."""
    return [
        RunEvent(
            EventKind.RESTART,
            curve.xs[at],
            f"after step {name_of(curve.xs[at - 1])} the log goes on with step "
            f"{name_of(curve.xs[at])}: a restart, or a second run in the same log",
            severity="warning",
        )
        for at in restarts
    ]


def in_order(events: list[RunEvent], most: int = MOST_EVENTS) -> list[RunEvent]:
    """Returns events by step, and if there are too many, neighbours of one kind as one."""
    events = sorted(events, key=lambda event: math.inf if event.step is None else event.step)
    if len(events) <= most:
        return events
    by_kind: dict[EventKind, list[RunEvent]] = {}
    for event in events:
        by_kind.setdefault(event.kind, []).append(event)
    out: list[RunEvent] = []
    for own in by_kind.values():
        out += _together(own, max(50, most * len(own) // len(events)))
    return sorted(out, key=lambda event: math.inf if event.step is None else event.step)


def _together(events: list[RunEvent], most: int) -> list[RunEvent]:
    placed = [event for event in events if event.step is not None and event.incident is None]
    if len(placed) <= most:
        return events
    between = [(b.step or 0) - (a.last or 0) for a, b in itertools.pairwise(placed)]
    near = sorted(between)[len(placed) - most - 1]
    out = [placed[0]]
    for event, distance in zip(placed[1:], between, strict=True):
        if distance > near:
            out.append(event)
        else:
            out[-1].last = event.last
            out[-1].count += event.count
    return out + [event for event in events if event.step is None or event.incident is not None]


def _event(record: dict[str, Any]) -> RunEvent:
    action, name = str(record.get("action", "")), str(record.get("name", ""))
    kind = _BY_ACTION.get(action) or _BY_NAME.get(name) or EventKind.NOTE
    severity = record.get("severity")
    when = record.get("time")
    return RunEvent(
        kind,
        _step(record.get("step")),
        str(record.get("message", "") or name)[:_LONGEST_TEXT],
        severity=severity if severity in ("error", "warning", "info") else "info",
        reason=str(record.get("reason", ""))[:_LONGEST_TEXT],
        time=float(when) if isinstance(when, (int, float)) and 0 < when < 1e11 else None,
    )


def _restart(record: dict[str, Any]) -> RunEvent:
    attempt, changes = record.get("attempt"), record.get("changes")
    said = [f"attempt {attempt}" if isinstance(attempt, int) else "restart"]
    if record.get("checkpoint"):
        said.append(f"from {str(record['checkpoint'])[:_LONGEST_TEXT]}")
    if changes:
        listed = (
            ", ".join(f"{key}: {value}" for key, value in list(changes.items())[:20])
            if isinstance(changes, dict)
            else ", ".join(map(str, changes[:20]))
            if isinstance(changes, list)
            else str(changes)
        )
        said.append(f"with {listed[:_LONGEST_TEXT]}")
    if record.get("outcome"):
        said.append(f"-> {str(record['outcome'])[:_LONGEST_TEXT]}")
    return RunEvent(
        EventKind.RESTART,
        _step(record.get("step")),
        " ".join(said),
        severity="warning",
        reason=str(record.get("reason") or "")[:_LONGEST_TEXT],
    )


def _summary(incident: Incident) -> str:
    code, summary = _field(incident, "cause", "code"), _field(incident, "cause", "summary")
    if isinstance(code, str) and code:
        return (
            f"{code}: {summary}"[:_LONGEST_TEXT] if isinstance(summary, str) and summary else code
        )
    where, kind = _field(incident, "symptom", "where"), _field(incident, "symptom", "kind")
    return f"{where or 'a value'} is {kind or 'not finite'}"[:_LONGEST_TEXT]


def _field(holder: Mapping[str, Any], first: str, then: str) -> Any:
    inner = holder.get(first)
    return inner.get(then) if isinstance(inner, dict) else None


def _step(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**53:
        return None
    return value


def _records(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yields the objects of JSON lines; None for a line that is none."""
    with path.open("rb") as file:
        while line := file.readline(_LONGEST_LINE):
            ended = more = line
            while len(more) == _LONGEST_LINE and not more.endswith(b"\n"):
                ended = more = file.readline(_LONGEST_LINE)
            if not line.strip():
                continue
            record = loads(line.decode("utf-8", "replace"))
            # The last line may still be on its way.
            if isinstance(record, dict):
                yield record
            elif ended.endswith(b"\n"):
                yield None
