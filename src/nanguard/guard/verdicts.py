"""Decides about the steps of a run: which of them pass, and what becomes of those that do not.

``Guard``, the integrations and ``nanguard run`` see steps in ways of their own, and put back what
a bad one has touched. What is bad about a step, what is said about it, and what is done, they all
ask here.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from nanguard.guard import events
from nanguard.guard.judge import Judge, Reading
from nanguard.guard.policy import Policy
from nanguard.guard.symptom import Symptom

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, MutableMapping

    from torch import Tensor

    from nanguard.findings import Finding
    from nanguard.guard.gate import Gate
    from nanguard.guard.judge import StepLimits
    from nanguard.guard.policy import Decision, Trouble
    from nanguard.settings import Settings


class Verdicts:
    """What is usual for the steps of a run, and what was spent on bad ones so far.

    Steps that have little to do with each other, such as those of two optimizers, are in lanes of
    their own: what is usual for one lane says nothing about another.

    Attributes:
        settings: What the user wants.
        policy: The ladder.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        lag: int = 0,
        lanes: MutableMapping[Any, Judge] | None = None,
    ) -> None:
        """Prepares.

        Args:
            settings: What the user wants.
            lag: How many steps the host may be behind the device.
            lanes: Holds what is usual for each lane.
        """
        self.settings = settings
        self.policy = Policy(settings, lag)
        self._lanes: MutableMapping[Any, Judge] = {} if lanes is None else lanes

    def add_lane(self, lane: Hashable, *, lag: int, adversarial: bool) -> None:
        """Begins a lane.

        Args:
            lane: What it is known by.
            lag: How many of its steps the host may be behind.
            adversarial: Whether its loss may rise for good, as others work against it.
        """
        self._lanes[lane] = Judge(self.settings, lag, adversarial=adversarial)

    def knows(self, lane: Hashable) -> bool:
        """Returns whether a lane has begun."""
        return lane in self._lanes

    def limits(self, lane: Hashable, ahead: int) -> StepLimits:
        """Returns what a step is held to.

        Args:
            lane: Its lane.
            ahead: How many steps of the lane the host has not seen yet.
        """
        return self._lanes[lane].limits(ahead)

    def acts_on(self, lane: Hashable, limits: StepLimits) -> tuple[float, float]:
        """Returns the loss and the gradient norm above which a step does not pass."""
        return self._lanes[lane].acts_on(limits)

    def close_gate(
        self,
        gate: Gate,
        lane: Hashable,
        limits: StepLimits,
        *,
        any_loss: bool = False,
        forgiven: Tensor | None = None,
        agree: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Judges on the device the step whose numbers are on a gate's board.

        Args:
            gate: The gate.
            lane: The step's lane.
            limits: What it is held to.
            any_loss: Whether its gradients say all there is to say.
            forgiven: Whether a bad gradient is somebody else's business.
            agree: Makes a verdict that is good here good on all ranks, or on none.
        """
        loss_limit, norm_limit = self.acts_on(lane, limits)
        if any_loss:
            loss_limit = math.inf
        gate.judge(loss_limit, norm_limit, forgiven=forgiven, agree=agree)

    def spike(self, lane: Hashable, reading: Reading, limits: StepLimits) -> Symptom | None:
        """Returns what keeps a step with finite numbers from passing; None if nothing does."""
        loss_limit, norm_limit = self.acts_on(lane, limits)
        if reading.loss <= loss_limit and reading.grad_norm <= norm_limit:
            return None
        return Symptom.of(reading, limits)

    def passed(
        self, lane: Hashable, reading: Reading, limits: StepLimits, step: int
    ) -> list[Finding]:
        """Takes in a step that was made; returns what there is to say about it."""
        found = self._lanes[lane].accept(reading, limits, step)
        if self.policy.good():
            message = f"learning rate back to x {self.policy.lr_factor:g}"
            found.append(events.LR_RESTORED(message, step=step))
        return found

    def failed(self, lane: Hashable, reading: Reading | None, trouble: Trouble) -> Decision:
        """Decides about a step that may not be made.

        Args:
            lane: Its lane.
            reading: Its numbers; None if there are none that a lane could learn from.
            trouble: What the ladder has to know.
        """
        if reading is not None and lane in self._lanes:
            self._lanes[lane].reject(reading)
        return self.policy.bad(trouble)

    def state_dict(self) -> dict[str, Any]:
        """Returns what was learned and spent."""
        return {
            "judges": {lane: judge.state_dict() for lane, judge in self._lanes.items()},
            "policy": self.policy.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from what ``state_dict`` returned."""
        for lane, judge in self._lanes.items():
            judge.load_state_dict(state["judges"][lane])
        self.policy.load_state_dict(state["policy"])
