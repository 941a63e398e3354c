"""Where things are tried: the same step again with something changed, within limits of time.

A limit in plain seconds would leave every slow step unexplained, and every step on a machine that
others use, too. Here the time the run took up to the step says how long one replay may take, and
the load of the machine stretches that. A number of seconds that the user has chosen is kept as it
is.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import time
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

from nanguard.findings import name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from nanguard.incident import Incident
    from nanguard.replay.task import ReplayOutcome, Task

# The environment variable with the seconds that the user allows for one explanation.
VARIABLE = "NANGUARD_EXPLAIN_SECONDS"
# The note, beside the other notes of a run, that says until when a replay may go on.
TRYING = "trying-"
# Seconds that every replay may take: the step of a small script is made at once, but importing
# what it needs from a cold disk is not.
SHORTEST = 30.0
# How much longer a replay may take than the run took: operations are watched one by one.
SLOWDOWN = 4.0
# How many replays of the longest kind an explanation may make.
REPLAYS = 6.0
# An explanation needs the traced replay, and two with something changed.
FEWEST_REPLAYS = 3.0
# Seconds up to a step from a recent copy of the process, if nobody has measured them, and how
# many steps that copy may be behind.
RECENT = 60.0
RECENT_STEPS = 3
# Processes that wait for a disk count as load; a network drive that hangs must not stretch a limit
# to hours.
MOST_LOAD = 16.0
# Seconds that may pass between two replays, while nothing tells of progress.
BETWEEN = 30.0


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """What one explanation may take, in seconds.

    Attributes:
        replay: The longest replay.
        total: All replays together.
        fixed: Whether the user has chosen the total; otherwise these are seconds of an idle
            machine.
    """

    replay: float
    total: float
    fixed: bool = False

    def allows(self, to_step: float) -> bool:
        """Returns whether the replays that any explanation needs can be made.

        Args:
            to_step: Seconds from where a replay begins to the step.
        """
        return FEWEST_REPLAYS * to_step <= self.total


def limits_for(to_step: float, total: float | None = None) -> TimeLimits:
    """Returns what an explanation may take.

    Args:
        to_step: Seconds from where a replay begins to the step, as measured in the run.
        total: Seconds for all replays that the user has chosen; None for no such choice.
    """
    replay = max(SHORTEST, SLOWDOWN * to_step)
    if total is None:
        return TimeLimits(replay, REPLAYS * replay)
    return TimeLimits(max(min(replay, total), total / 3), total, fixed=True)


def seconds_to_step(incident: Incident, method: str | None = "second-run") -> float:
    """Returns how many seconds lie between the beginning of a replay and the step.

    Args:
        incident: The incident, with what was measured in its run.
        method: How it is replayed; only a second run begins with the first line.
    """
    run = incident.get("run")
    run = run if isinstance(run, dict) else {}
    seconds, ordinal = _number(run.get("seconds")), _number(run.get("ordinal"))
    if method == "second-run":
        return seconds
    return min(seconds, max(RECENT, RECENT_STEPS * seconds / (ordinal + 1)))


def _number(value: Any) -> float:
    good = isinstance(value, (int, float)) and math.isfinite(value) and value > 0
    return float(value) if good else 0.0


def chosen_total() -> float | None:
    """Returns the seconds that the user allows for one explanation; None for no such choice."""
    try:
        seconds = float(os.environ.get(VARIABLE, ""))
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds > 0 else None


def load_factor(load: float, cores: int) -> float:
    """Returns how much longer everything takes on a machine with this load; at least 1.

    Args:
        load: How many processes want to run.
        cores: How many of them can.
    """
    factor = load / max(cores, 1)
    return min(max(factor, 1.0), MOST_LOAD) if math.isfinite(factor) else 1.0


def load_now() -> float:
    """Returns the load factor of this machine: of the last minute, or right now if that is more."""
    try:
        load = os.getloadavg()[0]
    except (OSError, AttributeError):
        return 1.0
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/loadavg") as file:  # noqa: PTH123
        # The average knows nothing of a job that has just been started.
        load = max(load, float(file.read().split()[3].split("/")[0]))
    return load_factor(load, _cores())


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _idle() -> float:
    return 1.0


class Budget:
    """The time of one explanation, used up replay by replay.

    A second on a machine with a load factor of 3 uses up a third of a second.
    """

    def __init__(
        self,
        limits: TimeLimits,
        *,
        load: Callable[[], float] = load_now,
        clock: Callable[[], float] = time.monotonic,
        note: Callable[[float], None] | None = None,
    ) -> None:
        """Begins with all of the time.

        Args:
            limits: What the explanation may take.
            load: Returns the load factor.
            clock: Returns the time in seconds.
            note: Called before each replay with the seconds it may take.
        """
        self._limits = limits
        self._left = limits.total
        self._load = _idle if limits.fixed else load
        self._clock = clock
        self._note = note

    @property
    def is_used_up(self) -> bool:
        """Whether there is no time for another replay."""
        return self._left <= 0

    @contextlib.contextmanager
    def replay(self) -> Iterator[float]:
        """Gives out the seconds of one replay, and counts those that it took."""
        load, began = self._load(), self._clock()
        seconds = min(self._limits.replay, self._left) * load
        if self._note is not None:
            self._note(seconds)
        try:
            yield seconds
        finally:
            self._left -= (self._clock() - began) / max(load, self._load())


def note_replay(path: Path, seconds: float) -> None:
    """Notes, for the process that waits, that a replay has begun and how long it may take."""
    draft = path.with_name(f".{path.name}")
    with contextlib.suppress(OSError):
        draft.write_text(json.dumps({"until": time.monotonic() + seconds}))
        draft.replace(path)


def read_note(path: Path) -> float | None:
    """Returns until when, on the monotonic clock, a replay may go on; None if nothing says so."""
    try:
        until = json.loads(path.read_text())["until"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return float(until) if isinstance(until, (int, float)) else None


def deadline(since: float, seconds: float, until: float | None, load: float) -> float:
    """Returns when an explanation that somebody waits for has shown no progress for too long.

    Args:
        since: When it was first waited for.
        seconds: How long it may take to begin with its first replay, on an idle machine.
        until: When its present replay must have ended; None if it has not begun with any.
        load: The load factor of the machine.
    """
    if until is None:
        return since + seconds * load
    return until + BETWEEN * load


class Replayer(Protocol):
    """What can replay a step: the run itself, or a second one.

    Attributes:
        wants_history: Whether something was to be tried that only a second run can show.
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
        result: How it ended, in words.
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
        # The loss of a good step, once it was asked for; None if there is none to replay.
        self._good_losses: list[float | None] = []
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

    def good_step_with(self, **changes: Any) -> tuple[float, float] | None:
        """Returns the loss of a good step as it is, and with a change; None if nobody knows.

        Args:
            changes: The change, as fields of a task.
        """
        if not self._good_losses:
            self._good_losses.append(self._loss_of_good())
        plain = self._good_losses[0]
        if plain is None or not math.isfinite(plain):
            return None
        changed = self._loss_of_good(**changes)
        return None if changed is None else (plain, changed)

    def _loss_of_good(self, **changes: Any) -> float | None:
        """Returns the loss of a good step; infinity if a change has made it a bad one."""
        outcome = self._run(replace(self._task, folder=None, on_good=True, **changes))
        if outcome is None or outcome.error is not None:
            return None
        return outcome.loss if outcome.finite else math.inf

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


# Losses of the last steps that say what is usual.
_RECENT_LOSSES = 20
# How many times the usual loss a finite one may be; above that, the step would ruin the weights.
_FAR = 100.0
# How far above the largest loss of good steps a loss may be: losses of several kinds take turns.
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
        calm = [abs(loss) for loss in losses[-_RECENT_LOSSES:] if loss and math.isfinite(loss)]
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
