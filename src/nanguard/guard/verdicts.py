"""Decides about the steps of a run: which of them pass, and what becomes of those that do not.

``Guard``, the integrations and ``nanguard run`` see steps in ways of their own, and put back what
a bad one has touched. What is bad about a step, what is said about it, and what is done, they all
ask here.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nanguard.findings import name_of, number
from nanguard.guard import events
from nanguard.guard.policy import Policy
from nanguard.signals import LARGEST, OPEN, DriftWatch, Limits, ScaleWatch, SpikeWindow

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, MutableMapping

    from torch import Tensor

    from nanguard.findings import Finding
    from nanguard.guard.gate import Gate
    from nanguard.guard.policy import Decision, Trouble
    from nanguard.settings import Settings

# How many times the largest of the last gradient norms a norm has to be to have jumped.
_JUMP, _JUMP_OVER = 2.0, 3


@dataclass
class Symptom:
    """What is wrong with a step.

    Attributes:
        where: ``loss``, ``gradient``, ``learning rate``, ``parameter``, ``optimizer state`` or
            ``buffer``.
        kind: ``nan``, ``inf`` or ``spike``.
        loss: The loss, if there was one.
        grad_norm: The norm of the gradients, if it was looked at.
        terms: The terms of the loss, by the names the script has for them.
        names: The tensors that are bad, by name.
        scale: Its scale.
        limit: What would have been usual, for a spike.
        scaled_by_hand: Whether a scaled loss was stepped without the scaler.
        evaluated: Whether it was noticed in an evaluation, and no step was touched.
    """

    where: str
    kind: str
    loss: float | None = None
    grad_norm: float | None = None
    terms: dict[str, float] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    scale: float | None = None
    limit: float | None = None
    scaled_by_hand: bool = False
    evaluated: bool = False

    @classmethod
    def of(cls, reading: Reading, limits: StepLimits) -> Symptom:
        """Returns what is wrong with the numbers of a bad step.

        Args:
            reading: The numbers.
            limits: What they were held to.
        """
        where, kind, limit = _wrong_with(reading, limits)
        return cls(
            where,
            kind,
            reading.loss,
            reading.grad_norm,
            reading.terms,
            scale=reading.scale,
            limit=limit,
        )

    def finding(self, step: int) -> Finding:
        """Returns the symptom as a finding about a step."""
        if self.kind == "spike":
            seen = events.LOSS_SPIKE if self.where == "loss" else events.GRADIENT_SPIKE
            usual = "" if self.limit is None else f"; up to {name_of(self.limit)} would be usual"
            return seen(f"{self.in_words()}{usual}", step=step)
        if self.where == "loss":
            for name, value in self.terms.items():
                if not math.isfinite(value):
                    message = f"loss term {name!r} is {name_of(value)}"
                    return events.NON_FINITE_LOSS(message, step=step, where=f"loss term {name!r}")
            return events.NON_FINITE_LOSS(self.in_words(), step=step)
        loss = name_of(math.nan if self.loss is None else self.loss)
        if self.where == "gradient":
            norm = name_of(math.nan if self.grad_norm is None else self.grad_norm)
            message = f"the gradient norm is {norm} while the loss is {loss}"
            return events.NON_FINITE_GRADIENT(message, step=step)
        message = f"parameters are not finite after this step (loss {loss})"
        return events.NON_FINITE_PARAMETER(message, step=step)

    def to_json(self) -> dict[str, Any]:
        """Returns the symptom as an incident holds it."""
        out: dict[str, Any] = {"where": self.where, "kind": self.kind}
        if self.loss is not None:
            out["loss"] = number(self.loss)
        if self.grad_norm is not None:
            out["grad_norm"] = number(self.grad_norm)
        out["terms"] = {name: number(value) for name, value in self.terms.items()}
        out["names"] = self.names[:20]
        if self.scale is not None:
            out["loss_scale"] = number(self.scale)
        if self.evaluated:
            out["during"] = "evaluation"
        return out

    def in_words(self) -> str:
        """Returns the symptom as a sentence begins."""
        if self.kind == "spike":
            value = self.loss if self.where == "loss" else self.grad_norm
            words = "the loss" if self.where == "loss" else "the gradient norm"
            return f"{words} jumped to {name_of(math.nan if value is None else value)}"
        if self.where == "loss":
            where = " in an evaluation" if self.evaluated else ""
            return f"the loss is {name_of(self.loss if self.loss is not None else math.nan)}{where}"
        if self.where == "gradient":
            loss = "" if self.loss is None else f" while the loss is {name_of(self.loss)}"
            named = f" (of {', '.join(self.names[:3])})" if self.names else ""
            return f"the gradient is not finite{named}{loss}"
        if self.where == "learning rate":
            return f"the learning rate is {self.kind}"
        named = ", ".join(self.names[:3])
        return f"{self.where} {named} is not finite after the step"


def _wrong_with(reading: Reading, limits: StepLimits) -> tuple[str, str, float | None]:
    """Returns where a bad number is, of what kind, and what would have been usual for a spike."""
    for value in (*reading.terms.values(), reading.loss):
        if not math.isfinite(value):
            return "loss", kind_of(value), None
    if reading.poisoned:
        return "parameter", "nan", None
    if not math.isfinite(reading.grad_norm):
        return "gradient", kind_of(reading.grad_norm), None
    if not reading.loss <= limits.loss.act:
        return "loss", "spike", limits.loss.act
    return "gradient", "spike", limits.grad_norm.act


def kind_of(value: float) -> str:
    """Returns what is wrong with a number that is not finite."""
    return "nan" if math.isnan(value) else "inf"


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The limits a step was held to."""

    loss: Limits = OPEN
    grad_norm: Limits = OPEN


@dataclass(slots=True)
class Reading:
    """The numbers of one step, once they have reached the host.

    Attributes:
        closed: Whether the gate was closed after the step.
        loss: The sum of the losses that backward was called on.
        grad_norm: The global gradient norm before clipping.
        terms: The named loss terms, in the order they were given.
        scale: The loss scale; None without a GradScaler.
        overflow: Whether the GradScaler skipped the step by itself.
        poisoned: Whether a scan found non-finite parameters after the step.
    """

    closed: bool
    loss: float
    grad_norm: float
    terms: dict[str, float]
    scale: float | None = None
    overflow: bool = False
    poisoned: bool = False

    @classmethod
    def of(cls, values: dict[str, float]) -> Reading:
        """Returns a reading from the numbers a ticket delivered."""
        terms = {
            name.removeprefix("term."): value
            for name, value in values.items()
            if name.startswith("term.")
        }
        return cls(
            closed=values["latch"] > 0,
            loss=values["loss"],
            grad_norm=values["grad_norm"],
            terms=terms,
            scale=values.get("scale"),
            overflow=values.get("overflow", 0.0) > 0,
            poisoned=values.get("poisoned", 0.0) > 0,
        )


class Judge:
    """Follows loss, gradient norm and loss scale over the accepted steps.

    The limits of a step come from the steps the host has surely seen by then, however late it
    is, so that two runs that accept the same steps also judge them alike.

    Attributes:
        lag: How many steps the host may be behind.
    """

    def __init__(self, settings: Settings, lag: int, *, adversarial: bool) -> None:
        self._mode = settings.spikes
        self._lag = lag
        self._windows = {
            "loss": _window(settings, positive=False),
            "grad_norm": _window(settings, positive=True),
        }
        self._drift = None if adversarial else DriftWatch(block=max(16, settings.spike_window // 2))
        self._scale = ScaleWatch()
        # The gradient norms of the last steps: what rises from one step to the next has not jumped.
        self._norms: deque[float] = deque(maxlen=_JUMP_OVER)
        self._known: deque[StepLimits] = deque([StepLimits()] * (lag + 1), maxlen=lag + 1)

    def limits(self, ahead: int) -> StepLimits:
        """Returns the limits of a step that comes so many steps after the last accepted one."""
        if self._mode == "off":
            return StepLimits()
        # The newest limits know of every accepted step; this step may know of those only that
        # lie more than the lag behind it.
        return self._known[min(self._lag, ahead)]

    def acts_on(self, limits: StepLimits) -> tuple[float, float]:
        """Returns the loss and the gradient norm above which a step is bad."""
        if self._mode != "act":
            return LARGEST, LARGEST
        return limits.loss.act, limits.grad_norm.act

    def accept(self, reading: Reading, limits: StepLimits, step: int) -> list[Finding]:
        """Takes in an applied step; returns what it warns of."""
        found = []
        if not reading.loss <= limits.loss.warn:
            found.append(_spike("loss", reading, limits.loss.warn, step))
        if not reading.overflow:
            before = max(self._norms, default=0.0)
            if not reading.grad_norm <= max(limits.grad_norm.warn, _JUMP * before):
                found.append(_spike("gradient", reading, limits.grad_norm.warn, step))
            self._norms.append(reading.grad_norm)
            self._windows["loss"].accept(reading.loss)
            self._windows["grad_norm"].accept(reading.grad_norm)
        drift = self._drift.accept(reading.loss) if self._drift else None
        if drift:
            found.append(events.DIVERGING_LOSS(drift, step=step))
        if reading.scale is not None:
            fall = self._scale.accept(reading.scale)
            if fall:
                found.append(events.FALLING_SCALE(fall, step=step))
        self._remember()
        return found if self._mode != "off" else []

    def reject(self, reading: Reading) -> None:
        """Learns how large a spike was that the guard acted on."""
        if all(map(math.isfinite, (reading.loss, reading.grad_norm))):
            self._windows["loss"].reject(reading.loss)
            self._windows["grad_norm"].reject(reading.grad_norm)
            self._known[-1] = self._current()

    def _remember(self) -> None:
        self._known.append(self._current())

    def _current(self) -> StepLimits:
        loss, grad_norm = self._windows["loss"].limits(), self._windows["grad_norm"].limits()
        last = self._known[-1]
        if last.loss is loss and last.grad_norm is grad_norm:
            return last  # limits are learned now and then only
        return StepLimits(loss, grad_norm)

    def state_dict(self) -> dict[str, Any]:
        """Returns what was learned."""
        return {
            "windows": {name: window.state_dict() for name, window in self._windows.items()},
            "drift": self._drift.state_dict() if self._drift else None,
            "scale": self._scale.state_dict(),
            "norms": list(self._norms),
            "known": [
                [known.loss.warn, known.loss.act, known.grad_norm.warn, known.grad_norm.act]
                for known in self._known
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from what ``state_dict`` returned."""
        for name, window in self._windows.items():
            window.load_state_dict(state["windows"][name])
        if self._drift is not None and state["drift"] is not None:
            self._drift.load_state_dict(state["drift"])
        self._scale.load_state_dict(state["scale"])
        self._norms.extend(state.get("norms", []))  # snapshots of earlier versions have none
        known = [StepLimits(Limits(a, b), Limits(c, d)) for a, b, c, d in state["known"]]
        self._known = deque(known[-self._lag - 1 :], maxlen=self._lag + 1)
        while len(self._known) <= self._lag:
            self._known.appendleft(self._known[0])


def _spike(where: str, reading: Reading, limit: float, step: int) -> Finding:
    return Symptom(where, "spike", reading.loss, reading.grad_norm, limit=limit).finding(step)


def _window(settings: Settings, *, positive: bool) -> SpikeWindow:
    return SpikeWindow(
        size=settings.spike_window,
        warmup=settings.spike_warmup,
        warn=settings.spike_warn,
        act=settings.spike_act,
        positive=positive,
    )


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
