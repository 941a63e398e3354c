"""Judges the numbers of steps: what they must stay below, learned from those before them."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanguard.guard import events
from nanguard.guard.symptom import Symptom
from nanguard.signals import LARGEST, OPEN, DriftWatch, Limits, ScaleWatch, SpikeWindow

if TYPE_CHECKING:
    from nanguard.findings import Finding
    from nanguard.settings import Settings


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
            if not reading.grad_norm <= limits.grad_norm.warn:
                found.append(_spike("gradient", reading, limits.grad_norm.warn, step))
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
