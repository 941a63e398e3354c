"""What a guarded run went through, in numbers and in words."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from nanguard.findings import Severity
from nanguard.guard.policy import Action

if TYPE_CHECKING:
    from nanguard.findings import Finding

# Events kept in memory; all of them are in events.jsonl.
_KEPT = 200


@dataclass(frozen=True, slots=True)
class Event:
    """A finding, and what the guard did about it.

    Attributes:
        finding: What was found.
        action: What was done; ``step`` where the step was applied all the same.
        reason: Why this rung of the ladder.
    """

    finding: Finding
    action: Action
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns the event as a line of ``events.jsonl``."""
        out = {"action": self.action.value, **self.finding.to_json()}
        return {**out, "reason": self.reason} if self.reason else out

    def __str__(self) -> str:
        at = "" if self.finding.step is None else f"step {self.finding.step}: "
        place = self.finding.where
        where = f" [{place}]" if place and place not in self.finding.message else ""
        done = "" if self.action is Action.STEP else f" -> {_DONE[self.action]}"
        reason = f" ({self.reason})" if self.reason else ""
        return f"{at}{self.finding.message}{where}{done}{reason}"


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
            f"{self.warnings} warnings"
        )
        return "\n".join([head, *(f"  {event}" for event in self.events)])
