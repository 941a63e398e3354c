"""How a step is judged and applied: late through the gate, or after the host has read."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nanguard import numerics
from nanguard.errors import UsageError
from nanguard.guard.optimizers import (
    Gated,
    can_be_gated,
    learning_rate,
    parameters_of,
    scaled_lr,
    state_tensors,
)
from nanguard.guard.parts import moves, trained
from nanguard.numerics import all_finite, local

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from nanguard.guard.flights import Flight, Flights
    from nanguard.guard.optimizers import LossScaling
    from nanguard.guard.parts import Parts
    from nanguard.numerics import Gradients


def apply_gated(
    optimizers: Sequence[Optimizer], closed: Tensor, scaling: LossScaling, lr_factor: float
) -> None:
    """Steps fused optimizers; on the device it is a no-op if a 0-dim flag there is set."""
    with scaled_lr(optimizers, lr_factor), Gated(optimizers, closed):
        for optimizer in optimizers:
            optimizer.step()
    scaling.update()


def apply_read(
    optimizers: Sequence[Optimizer], scaling: LossScaling, lr_factor: float, *, overflow: bool
) -> None:
    """Steps any optimizers after the host has seen that the step is good."""
    if not overflow:
        with scaled_lr(optimizers, lr_factor):
            for optimizer in optimizers:
                optimizer.step()
    scaling.update()


@dataclass(frozen=True, slots=True)
class Clipping:
    """What is to be done to the gradients once the step is judged, and not before.

    Clipping spreads one bad gradient over all of them, and clamping hides an infinite one, so
    neither may come before the verdict.

    Attributes:
        gradients: The gradients.
        norm: Their global norm.
        max_norm: The norm to scale them down to.
        max_value: The bound of every element.
    """

    gradients: Gradients
    norm: Tensor
    max_norm: float | None
    max_value: float | None

    def apply(self) -> None:
        """Clips the gradients."""
        if self.max_norm is not None:
            self.gradients.clip(self.norm, self.max_norm)
        if self.max_value is not None:
            self.gradients.clamp(self.max_value)


class ClosureStep:
    """A step of an optimizer that evaluates the loss itself, several times (LBFGS).

    It moves the parameters between evaluations, so what it moved is copied first and put back
    if the first loss is bad or the parameters or its state end up non-finite. A bad trial point
    that the line search recovers from is none of our business.

    Attributes:
        loss: The first loss, as a 0-dim tensor.
    """

    def __init__(self, optimizer: Optimizer, closure: Callable[[], Tensor]) -> None:
        self._optimizer = optimizer
        self._closure = closure
        self._parameters = parameters_of([optimizer])
        self._before = [local(p.detach()).clone() for p in self._parameters]
        self._state = [(p, copy.deepcopy(state)) for p, state in optimizer.state.items()]
        self.loss: Tensor | None = None

    def run(self, lr_factor: float) -> None:
        """Lets the optimizer take its step."""
        with scaled_lr([self._optimizer], lr_factor):
            self._optimizer.step(self._evaluate)  # type: ignore[arg-type]

    def is_finite(self) -> bool:
        """Returns whether parameters and optimizer state are finite now."""
        return all_finite([*self._parameters, *state_tensors([self._optimizer])])

    @torch.no_grad()
    def undo(self) -> None:
        """Puts parameters and optimizer state back."""
        for parameter, before in zip(self._parameters, self._before, strict=True):
            local(parameter).copy_(before)
        self._optimizer.state.clear()
        for parameter, state in self._state:
            self._optimizer.state[parameter] = state

    def _evaluate(self) -> Tensor:
        loss = self._closure()
        if self.loss is None:
            self.loss = loss.detach().reshape(()).clone()
        return loss


class Stepper:
    """Judges steps on the device and applies the good ones."""

    def __init__(self, parts: Parts, flights: Flights) -> None:
        self._parts = parts
        self._flights = flights
        self._usual_backwards = 0

    def seed(self, flight: Flight, loss: Tensor) -> Tensor | None:
        """Returns what backward starts from where the gradient tells other ranks the verdict."""
        if self._parts.ranks.channel != "gradient":
            return None
        limit = math.inf
        if len(self._parts.optimizers) == 1 and flight.backwards == self._usual_backwards:
            # Only the last backward of a step sees the whole loss that the limit is about.
            verdicts = self._parts.verdicts
            limit, _ = verdicts.acts_on(-1, verdicts.limits(-1, self._flights.ahead(-1)))
        return self._parts.ranks.seed(loss, numerics.within(self._parts.gate["loss"], limit))

    def step(
        self,
        flight: Flight,
        lane: int,
        optimizers: Sequence[Optimizer],
        *,
        max_norm: float | None,
        max_value: float | None,
        grad_norm: Tensor | float | None,
    ) -> None:
        """Judges a step whose gradients are there, and applies it if it is good."""
        if "loss" not in flight.written:
            raise UsageError(
                "guard.step() was called, but guard.backward(loss) was not since the last step.",
                where="guard.step()",
                do="Call guard.backward(loss) instead of loss.backward(), then guard.step().",
            )
        parts = self._parts
        self._prepare(flight, lane, optimizers)
        self._usual_backwards = flight.backwards
        parts.scaling.unscale(optimizers)
        gradients = numerics.Gradients(parameters_of(optimizers))
        if grad_norm is None:
            norm = gradients.norm(out=parts.gate["grad_norm"])
        else:
            norm = torch.as_tensor(grad_norm, device=parts.devices[0])
        clipping = Clipping(gradients, norm, max_norm, max_value)
        parts.gate.write("grad_norm", numerics.whole(norm))
        self._judge(flight, parts.scaling.readings(optimizers))
        late = not self._replayed(flight) and parts.lag and self._flights.feed is not None
        if late and all(map(can_be_gated, optimizers)):
            self._apply_late(flight, optimizers, clipping)
        else:
            self._apply_read(flight, optimizers, clipping)

    def step_with_closure(
        self, flight: Flight, lane: int, optimizer: Optimizer, closure: Callable[[], Tensor]
    ) -> None:
        """Lets an optimizer evaluate the loss by itself; undoes all of it if that goes wrong."""
        parts, gate = self._parts, self._parts.gate
        flight.searched = True
        self._prepare(flight, lane, [optimizer])
        self._flights.way_back.before_update(self._flights.updates)
        attempt = ClosureStep(optimizer, _starting_anew(flight, closure))
        attempt.run(flight.lr_factor)
        if attempt.loss is None:
            raise UsageError(
                f"{type(optimizer).__name__} did not call the closure it was given.",
                where="guard.step(closure=...)",
                do="Leave closure out for optimizers that do not need one.",
            )
        flight.written = {}
        flight.sum(gate, "loss", attempt.loss)
        gradients = numerics.Gradients(parameters_of([optimizer]))
        gate.write("grad_norm", numerics.whole(gradients.norm()))
        loss_limit, _ = parts.verdicts.acts_on(lane, flight.limits)
        good = numerics.within(gate["loss"], loss_limit) & attempt.is_finite()
        gate.close_if(~parts.ranks.agree(good))
        flight.tickets = [gate.post(self._numbers(flight))]
        if flight.read().closed:
            attempt.undo()
        else:
            self._after_update([optimizer], None)
        self._flights.launch(flight, keep=0)

    def judge(self, flight: Flight, lane: int, optimizers: Sequence[Optimizer]) -> bool:
        """Judges a step that somebody else will make; returns whether it may be made.

        Args:
            flight: The step.
            lane: Which optimizers it steps.
            optimizers: These optimizers; their gradients are complete.
        """
        parts = self._parts
        self._prepare(flight, lane, optimizers)
        self._usual_backwards = flight.backwards
        gradients = numerics.Gradients(parameters_of(optimizers))
        norm = numerics.whole(gradients.norm(wide=parts.scaling.active))
        scaling = parts.scaling.seen(optimizers, norm)
        parts.gate.write("grad_norm", norm / scaling.pop("factor", 1.0))
        self._judge(flight, scaling)
        self._replayed(flight)
        flight.tickets = [parts.gate.post(self._numbers(flight))]
        if not flight.read().closed:
            return True
        flight.suspects = _bad_gradients(trained(parts.models, optimizers))
        return False

    def give_up(self, flight: Flight, optimizers: Sequence[Optimizer]) -> None:
        """Ends a bad step that somebody else would have made."""
        self._flights.launch(flight, keep=0)
        if self._parts.recorder is not None:
            self._parts.recorder.held_back(optimizers)

    def take(
        self, flight: Flight, optimizers: Sequence[Optimizer], call: Callable[[], None]
    ) -> None:
        """Lets somebody else make a good step."""
        self._flights.way_back.before_update(self._flights.updates)
        self._make(optimizers, call)
        self._parts.unchanged.update_average(None, optimizers)
        self._scan_read(flight, optimizers)
        self._flights.launch(flight, keep=0)

    def _prepare(self, flight: Flight, lane: int, optimizers: Sequence[Optimizer]) -> None:
        flight.lane = lane
        rate = learning_rate(optimizers)
        verdicts = self._parts.verdicts
        flight.lr_factor = verdicts.policy.lr_factor_of(self._flights.ahead())
        flight.lr = None if rate is None else rate * flight.lr_factor
        flight.limits = verdicts.limits(lane, self._flights.ahead(lane))

    def _judge(self, flight: Flight, scaling: dict[str, Tensor]) -> None:
        """Closes the gate if a step may not be applied; the same on every rank."""
        parts, gate = self._parts, self._parts.gate
        forgiven = None
        if scaling:
            for name, value in scaling.items():
                gate.write(name, value)
            # A scaler deals with overflow by itself, as long as its scale can be to blame.
            forgiven = (gate["overflow"] > 0) & (gate["scale"] > 1.0)
        channel = parts.ranks.channel
        parts.verdicts.close_gate(
            gate,
            flight.lane,
            flight.limits,
            any_loss=channel == "gradient",
            forgiven=forgiven,
            agree=parts.ranks.agree if channel == "collective" else None,
        )

    def _numbers(self, flight: Flight) -> tuple[str, ...]:
        """Returns which numbers on the board are about a step."""
        scaling = ("scale", "overflow") if self._parts.scaling.active else ()
        return ("latch", "grad_norm", *flight.written, *scaling)

    def _apply_late(
        self, flight: Flight, optimizers: Sequence[Optimizer], clipping: Clipping
    ) -> None:
        """Applies a step through the gate; the host will look at it later."""
        parts, gate = self._parts, self._parts.gate
        self._flights.way_back.before_update(self._flights.updates)
        clipping.apply()
        closed = gate.latch
        if parts.scaling.active:
            # What the scaler calls an overflow is not applied either, but it closes no gate.
            closed = torch.maximum(gate.latch, gate["overflow"])
        apply_gated(optimizers, closed, parts.scaling, flight.lr_factor)
        self._after_update(optimizers, gate.latch)
        parts.unchanged.restore_if(gate.latch)
        names = self._numbers(flight)
        poisoned = self._scan(optimizers)
        if poisoned is not None:
            gate.write("poisoned", poisoned)
            names = (*names, "poisoned")
        flight.tickets = [gate.post(names)]
        if poisoned is not None:
            gate.close_if(poisoned)
        self._flights.launch(flight, keep=parts.lag)

    def _apply_read(
        self, flight: Flight, optimizers: Sequence[Optimizer], clipping: Clipping
    ) -> None:
        """Applies a step after the host has seen that it is good."""
        parts, gate = self._parts, self._parts.gate
        flight.tickets = [gate.post(self._numbers(flight))]
        reading = flight.read()
        if reading.closed:
            flight.suspects = _bad_gradients(trained(parts.models, optimizers))
        else:
            self._flights.way_back.before_update(self._flights.updates)
            self._make(optimizers, lambda: self._clip_and_apply(flight, optimizers, clipping))
            self._after_update(optimizers, None)
            self._scan_read(flight, optimizers)
        self._flights.launch(flight, keep=0)
        if reading.closed and parts.recorder is not None:
            parts.recorder.held_back(optimizers)

    def _clip_and_apply(
        self, flight: Flight, optimizers: Sequence[Optimizer], clipping: Clipping
    ) -> None:
        clipping.apply()
        overflow = flight.read().overflow
        apply_read(optimizers, self._parts.scaling, flight.lr_factor, overflow=overflow)

    def _make(self, optimizers: Sequence[Optimizer], call: Callable[[], None]) -> None:
        """Makes a step, under the eyes of a recorder if there is one."""
        if self._parts.recorder is None:
            call()
        else:
            self._parts.recorder.apply(optimizers, call)

    def _replayed(self, flight: Flight) -> bool:
        """Sets the verdict as it was in the run, where this process replays it."""
        recorder = self._parts.recorder
        held_back = None if recorder is None else recorder.verdict(flight.step)
        if held_back is None:
            return False
        flight.passed = held_back and not bool(self._parts.gate.latch)
        self._parts.gate.set(closed=held_back)
        return True

    def _scan_read(self, flight: Flight, optimizers: Sequence[Optimizer]) -> None:
        poisoned = self._scan(optimizers)
        if poisoned is not None:
            self._parts.gate.write("poisoned", poisoned)
            flight.tickets.append(self._parts.gate.post(("poisoned",)))

    def _after_update(self, optimizers: Sequence[Optimizer], latch: Tensor | None) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        if self._parts.scheduler_every == "step":
            for scheduler in self._parts.schedulers:
                if moves(scheduler, optimizers):
                    scheduler.step()
        self._parts.unchanged.update_average(latch, optimizers)

    def _scan(self, optimizers: Sequence[Optimizer]) -> Tensor | None:
        """Returns, now and then, whether the run is non-finite, as a bool on the device."""
        due = (self._flights.updates + 1) % self._parts.settings.scan_every == 0
        suspicious = self._flights.steps in self._flights.way_back.suspicious
        if not due and not suspicious:
            return None
        buffers = self._flights.way_back.recovery.finite_buffers().values()
        tensors = [*parameters_of(optimizers), *buffers]
        if suspicious:
            tensors += state_tensors(self._parts.optimizers)
        # Every rank has buffers of its own, even where the parameters are the same.
        return self._parts.ranks.any(numerics.non_finite(tensors, self._parts.devices[0]))


def _starting_anew(flight: Flight, closure: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Returns a closure that starts the sums of a step anew at each evaluation."""

    def evaluate() -> Tensor:
        flight.written, flight.backwards = {}, 0
        with torch.enable_grad():
            return closure()

    return evaluate


def _bad_gradients(parameters: dict[str, Tensor]) -> list[str]:
    return [
        name
        for name, parameter in parameters.items()
        if parameter.grad is not None and not numerics.all_finite([parameter.grad])
    ]
