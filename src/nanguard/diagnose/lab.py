"""Where things are tried: the same step again, with something changed."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from nanguard.findings import name_of

if TYPE_CHECKING:
    from nanguard.diagnose.limits import Budget
    from nanguard.replay.task import Outcome, Task


class Replayer(Protocol):
    """Whoever can replay a step: the run itself, or a second one.

    Attributes:
        wants_history: Whether it was asked for something that only a second run can show.
    """

    wants_history: bool

    def run(self, task: Task, seconds: float) -> Outcome | None:
        """Replays a step; returns None if there was no answer in time."""


_BROKEN = re.compile(
    "could not be tried: "
    "(Name|UnboundLocal|Attribute|Type|Syntax|Indentation|Index|Key|Value|Runtime)Error"
)


@dataclass(frozen=True, slots=True)
class Trial:
    """Something that was tried.

    Attributes:
        what: What was changed, in words.
        finite: Whether the step was finite then; None if it could not be tried.
        result: What came of it, in words.
        loss: The loss of the step then, if it is known.
    """

    what: str
    finite: bool | None
    result: str
    loss: float | None = None

    @property
    def crashed(self) -> bool:
        """Whether the code raised an error that a wrong change makes it raise."""
        return self.finite is None and _BROKEN.match(self.result) is not None

    def to_json(self) -> dict[str, Any]:
        """Returns the trial as an incident holds it."""
        return {"what": self.what, "finite": self.finite, "result": self.result}


class Lab:
    """Replays a step with changes, within a budget of time, and keeps a list of what was tried.

    Attributes:
        trials: Everything that was tried.
    """

    def __init__(self, replayer: Replayer, task: Task, budget: Budget) -> None:
        self._replayer = replayer
        self._task = task
        self._budget = budget
        self._known: dict[str, Outcome | None] = {}
        self.trials: list[Trial] = []

    def trace(self, **changes: Any) -> Outcome | None:
        """Replays the step with every operation watched."""
        return self._run(replace(self._task, trace=True, **changes))

    def try_out(self, what: str, **changes: Any) -> Trial:
        """Replays the step with something changed; the answer goes onto the list.

        Args:
            what: The change in words.
            changes: The change, as fields of a task.
        """
        known = next((trial for trial in self.trials if trial.what == what), None)
        if known is not None:
            return known
        outcome = self._run(replace(self._task, folder=None, **changes))
        loss = None if outcome is None else outcome.loss
        trial = Trial(what, _verdict(outcome), _in_words(outcome), loss)
        self.trials.append(trial)
        return trial

    @property
    def out_of_time(self) -> bool:
        """Whether nothing more can be tried."""
        return self._budget.is_used_up

    def _run(self, task: Task) -> Outcome | None:
        if self.out_of_time:
            return None
        with self._budget.replay() as seconds:
            return self._replayer.run(task, seconds)


def _verdict(outcome: Outcome | None) -> bool | None:
    if outcome is None or outcome.error is not None:
        return None
    return outcome.finite


def _in_words(outcome: Outcome | None) -> str:
    if outcome is None:
        return "no answer within the time"
    if outcome.error is not None:
        return f"could not be tried: {outcome.error}"
    if outcome.symptom is not None:
        return f"step {outcome.step}: {outcome.symptom.in_words()}"
    loss = "" if outcome.loss is None else f": loss {name_of(outcome.loss)}"
    return f"replayed step {outcome.step}{loss}"
