"""Where things are tried: the same step again, with something changed."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

from nanguard.findings import name_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nanguard.diagnose.limits import Budget
    from nanguard.replay.task import ReplayOutcome, Task


class Replayer(Protocol):
    """Whoever can replay a step: the run itself, or a second one.

    Attributes:
        wants_history: Whether it was asked for something that only a second run can show.
    """

    wants_history: bool

    def run(self, task: Task, seconds: float) -> ReplayOutcome | None:
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
        self._known: dict[str, ReplayOutcome | None] = {}
        self.trials: list[Trial] = []

    def trace(self, **changes: Any) -> ReplayOutcome | None:
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

    def _run(self, task: Task) -> ReplayOutcome | None:
        if self.out_of_time:
            return None
        with self._budget.replay() as seconds:
            return self._replayer.run(task, seconds)


def _verdict(outcome: ReplayOutcome | None) -> bool | None:
    if outcome is None or outcome.error is not None:
        return None
    return outcome.finite


def _in_words(outcome: ReplayOutcome | None) -> str:
    if outcome is None:
        return "no answer within the time"
    if outcome.error is not None:
        return f"could not be tried: {outcome.error}"
    if outcome.symptom is not None:
        return f"step {outcome.step}: {outcome.symptom.in_words()}"
    loss = "" if outcome.loss is None else f": loss {name_of(outcome.loss)}"
    return f"replayed step {outcome.step}{loss}"


_LAST = 20
# A finite loss that is so many times the usual one: the step would ruin the weights all the same.
_FAR = 100.0
# The largest loss of good steps may be exceeded by so much: losses of several kinds take turns.
_ABOVE_LARGEST = 10.0
# A loss below this ruins nothing: one that is a mean of signed numbers is usually about 0.
_HARMLESS = 10.0
# Nobody trains with a loss beyond this; all there is to go by before the first good step.
_SANE = 1e8
# One outlier may make the true loss that much larger.
_MORE_IF_EXACT = 100.0


class Usual:
    """What is usual for the loss, from the steps before a bad one.

    Attributes:
        loss: The size of the usual loss; infinite if nothing is known about it.
    """

    def __init__(self, losses: Sequence[float]) -> None:
        calm = [abs(loss) for loss in losses[-_LAST:] if loss and math.isfinite(loss)]
        # A run that diverges shows it before it comes to infinity: these steps were no good ones.
        while len(calm) > 1 and calm[-1] > _FAR * median(calm[:-1]):
            calm.pop()
        self.loss = median(calm) if calm else math.inf
        largest = max(calm, default=math.inf)
        self._limit = max(_FAR * self.loss, _ABOVE_LARGEST * largest, _HARMLESS)
        if not calm:
            self._limit = _SANE

    def is_far_from(self, trial: Trial, *, exact: bool = False) -> bool:
        """Returns whether a step that is finite has a loss far above what is usual.

        Args:
            trial: What was tried.
            exact: Whether the change computes the same, so that the loss was that large before.
        """
        limit = self._limit * (_MORE_IF_EXACT if exact else 1.0)
        return bool(trial.finite) and trial.loss is not None and abs(trial.loss) > limit

    def allows(self, trial: Trial | None, *, exact: bool = False) -> bool:
        """Returns whether a trial made the step a good one: finite, and not far off."""
        return trial is not None and bool(trial.finite) and not self.is_far_from(trial, exact=exact)
