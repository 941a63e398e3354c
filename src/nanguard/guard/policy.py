"""The ladder: what to do about a bad step. Pure decisions, no torch.

Skip the batch, then cut the learning rate, then roll back to the last good snapshot, then stop.
Every rung is bounded by a setting, so that no run can go on losing batches in silence.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanguard.settings import Settings


# Bad steps in a row that are excused as something bad is known to be in their data.
_IN_A_ROW = 20


class Action(str, Enum):
    """What was done with a step.

    Attributes:
        STEP: It was applied.
        OVERFLOW: The GradScaler skipped it by itself, and lowers its scale.
        SKIP: Its batch was skipped.
        CUT_LR: Its batch was skipped, and the learning rate cut.
        ROLLBACK: The run was rolled back to the last good snapshot.
        STOP: The run was stopped.
        NOTED: A bad number that no step depends on, such as one of an evaluation.
    """

    STEP = "step"
    OVERFLOW = "overflow"
    SKIP = "skip"
    CUT_LR = "cut-lr"
    ROLLBACK = "rollback"
    STOP = "stop"
    NOTED = "noted"


@dataclass(frozen=True, slots=True)
class Trouble:
    """What the policy has to know about a bad step.

    Attributes:
        step: The step that was bad.
        poisoned: Whether parameters, buffers or optimizer state are already non-finite, so that
            skipping would be useless.
        can_roll_back: Whether there is a good snapshot.
        known: Why the step was bound to be bad, such as a sample that was found bad before; ""
            if nothing was known.
        rate_matters: Whether a lower learning rate may help.
    """

    step: int
    poisoned: bool = False
    can_roll_back: bool = False
    known: str = ""
    rate_matters: bool = True


@dataclass(frozen=True, slots=True)
class Decision:
    """An action, and the reason for it in words."""

    action: Action
    reason: str


class Policy:
    """Decides about bad steps and remembers what it has already spent.

    Attributes:
        lr_factor: What the scheduled learning rate is multiplied with, as far as is known now.
    """

    def __init__(self, settings: Settings, lag: int = 0) -> None:
        self._settings = settings
        self._lag = lag
        # What was known after each of the last good steps, the newest at the end.
        self._known: deque[float] = deque([1.0] * (lag + 1), maxlen=lag + 1)
        self._bad_steps: deque[int] = deque()
        # Those that were bound to be bad, and so said nothing about the run.
        self._excused: deque[int] = deque()
        self._total = 0
        self._cuts = 0
        self._rollbacks = 0
        self._good_since_cut = 0
        self.lr_factor = 1.0

    def lr_factor_of(self, ahead: int) -> float:
        """Returns the factor for a step that comes some steps after the last accepted one.

        It depends on the step alone, and not on how much the host has seen of those before it.
        """
        return self._known[min(self._lag, ahead)]

    def good(self) -> bool:
        """Counts a good step; returns whether it earned back a part of the learning rate."""
        earned = False
        if self.lr_factor < 1.0:
            self._good_since_cut += 1
            earned = self._good_since_cut >= self._settings.lr_climb_after
        if earned:
            self._good_since_cut = 0
            self.lr_factor = min(1.0, self.lr_factor / self._settings.lr_cut)
        self._known.append(self.lr_factor)
        return earned

    def bad(self, trouble: Trouble) -> Decision:
        """Decides what to do about a bad step, after which nothing is in flight."""
        decision = self._decide(trouble)
        self._known.extend([self.lr_factor] * (self._lag + 1))
        return decision

    def _decide(self, trouble: Trouble) -> Decision:
        self._total += 1
        known = bool(trouble.known) and not trouble.poisoned and self._is_excused(trouble.step)
        if not known:
            self._good_since_cut = 0
            self._bad_steps.append(trouble.step)
        while self._bad_steps and self._bad_steps[0] <= trouble.step - self._settings.recent:
            self._bad_steps.popleft()
        limit = self._settings.max_bad
        if limit is not None and self._total > limit:
            return Decision(Action.STOP, f"{self._total} bad steps, max_bad allows {limit}")
        if trouble.poisoned:
            return self._roll_back(trouble, "the run itself holds non-finite values")
        if self._settings.on_bad == "stop":
            return Decision(Action.STOP, "on_bad is 'stop'")
        if known:
            # Nothing about the run is unstable: no rung of the ladder would help.
            return Decision(Action.SKIP, trouble.known)
        if self._settings.on_bad == "rollback":
            return self._roll_back(trouble, "on_bad is 'rollback'")
        return self._climb(trouble)

    def _is_excused(self, step: int) -> bool:
        """Returns whether a step that was bound to be bad is the exception, and most are good."""
        excused = self._excused
        excused.append(step)
        while excused[0] <= step - self._settings.recent:
            excused.popleft()
        in_a_row = len(excused) > _IN_A_ROW and excused[-1 - _IN_A_ROW] == step - _IN_A_ROW
        return not in_a_row and 2 * len(excused) <= self._settings.recent

    def _climb(self, trouble: Trouble) -> Decision:
        settings = self._settings
        recent = len(self._bad_steps)
        if recent <= settings.max_skips:
            return Decision(
                Action.SKIP,
                f"bad step {recent} of at most {settings.max_skips} in {settings.recent}",
            )
        reason = f"{recent} bad steps in {settings.recent}, max_skips allows {settings.max_skips}"
        lowered = max(settings.lr_floor, self.lr_factor * settings.lr_cut)
        if self._cuts < settings.max_lr_cuts and lowered < self.lr_factor:
            self._cuts += 1
            self._bad_steps.clear()
            if not trouble.rate_matters:
                why = "a lower learning rate would not help"
                return Decision(Action.SKIP, f"{reason}; {why}")
            self.lr_factor = lowered
            return Decision(Action.CUT_LR, f"{reason}; learning rate now x {lowered:g}")
        return self._roll_back(trouble, reason)

    def _roll_back(self, trouble: Trouble, reason: str) -> Decision:
        limit = self._settings.max_rollbacks
        if not trouble.can_roll_back:
            return Decision(Action.STOP, f"{reason}; there is no good snapshot to roll back to")
        if self._rollbacks >= limit:
            return Decision(Action.STOP, f"{reason}; all {limit} rollbacks are spent")
        self._rollbacks += 1
        self._bad_steps.clear()
        return Decision(Action.ROLLBACK, reason)

    @property
    def can_go_back(self) -> bool:
        """Whether a rollback is left."""
        return self._rollbacks < self._settings.max_rollbacks

    def state_dict(self) -> dict[str, Any]:
        """Returns what has been spent."""
        return {
            "bad_steps": list(self._bad_steps),
            "excused": list(self._excused),
            "total": self._total,
            "cuts": self._cuts,
            "rollbacks": self._rollbacks,
            "good_since_cut": self._good_since_cut,
            "lr_factor": self.lr_factor,
            "known": list(self._known),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from what ``state_dict`` returned."""
        self._bad_steps = deque(state["bad_steps"])
        self._excused = deque(state.get("excused", []))  # snapshots of earlier versions have none
        self._total = state["total"]
        self._cuts = state["cuts"]
        self._rollbacks = state["rollbacks"]
        self._good_since_cut = state["good_since_cut"]
        self.lr_factor = state["lr_factor"]
        known = list(state["known"])[-self._lag - 1 :]
        known = [known[0]] * (self._lag + 1 - len(known)) + known
        self._known = deque(known, maxlen=self._lag + 1)
