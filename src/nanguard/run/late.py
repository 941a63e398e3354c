"""Steps on CUDA: judged and held back on the device, looked at by the host a little later.

When the host learns of a bad step, the device has ignored the steps behind it. They are made again
then, one after the other, from what they began with, so that the run goes on as if only the bad one
had been left out.
"""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from nanguard.guard.gate import Gate, InFlight
from nanguard.guard.optimizers import (
    Gated,
    can_be_gated,
    hyperparameters,
    parameters_of,
    set_hyperparameters,
)
from nanguard.guard.verdicts import Reading, Symptom
from nanguard.numerics import Gradients, non_finite
from nanguard.replay.inplace import InPlace
from nanguard.run.good_steps import Numbers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor
    from torch.optim import Optimizer

    from nanguard.guard.gate import Ticket
    from nanguard.guard.verdicts import StepLimits
    from nanguard.replay.start import Start
    from nanguard.replay.watch import Watch
    from nanguard.run.live import Live

# Steps the host may be behind the device, and steps between two scans of the parameters.
_LAG = 2
_SCAN = 64
_NUMBERS = ("latch", "loss", "grad_norm")


@dataclass(slots=True)
class LateStep:
    """A step that the host has not seen yet.

    Attributes:
        ticket: Its numbers, on their way from the device.
        optimizer: Whose step it is.
        step: The step as this optimizer counts.
        ordinal: The step as all optimizers together count.
        round: Which round of optimizers it belongs to.
        starts: What its passes began with.
        rates: The hyperparameters it was made with.
        limits: What its numbers were held to.
    """

    ticket: Ticket
    optimizer: Optimizer
    step: int
    ordinal: int
    round: int
    starts: list[Start]
    rates: list[dict[str, Any]]
    limits: StepLimits


class Late:
    """Keeps the device from applying bad steps, without making the host wait.

    Attributes:
        flights: The steps that the host has not seen yet.
    """

    def __init__(self, live: Live) -> None:
        self._live = live
        self._gate: Gate | None = None
        self.flights: InFlight[LateStep, dict[str, float]] = InFlight(
            lambda flight: flight.ticket.read(),
            lambda numbers: not (numbers["latch"] or numbers.get("poisoned")),
            self._count,
        )
        # The last optimizer that could be held back, with what that depends on.
        self._taken: tuple[Any, ...] | None = None

    def can_take(self, optimizer: Optimizer) -> bool:
        """Returns whether an optimizer's own kernel can be held back on the device."""
        groups = optimizer.param_groups
        if not groups or not groups[0].get("fused"):
            return False
        params = groups[0]["params"]
        if (params and params[0].is_cpu) or self._live.together.active:
            return False  # ranks agree on the host, and replay nothing in the run itself
        known = (weakref.ref(optimizer), vars(optimizer).get("step"), len(groups))
        if known == self._taken and optimizer.state:
            return True
        first = next((p for g in groups for p in g["params"]), None)
        if first is None or not first.is_cuda or not can_be_gated(optimizer):
            return False
        if self._gate is None:
            self._gate = Gate(first.device)
        # To look takes longer than the rest of a step does; whether SGD can be gated may change.
        self._taken = None if isinstance(optimizer, torch.optim.SGD) else known
        return True

    def lag_of(self, optimizer: Any) -> int:
        """Returns how many steps the host may be behind with an optimizer."""
        first = next((p for g in optimizer.param_groups for p in g["params"]), None)
        fused = any(group.get("fused") for group in optimizer.param_groups)
        return _LAG if first is not None and first.is_cuda and fused else 0

    def step(self, optimizer: Optimizer, call: Callable[..., Any]) -> Any:
        """Makes a step that is a no-op on the device if it, or one before it, is bad."""
        live, gate = self._live, self._gate
        assert gate is not None  # noqa: S101 - can_take has made it
        limits = self._judge(live, optimizer)
        with Gated([optimizer], gate.latch), live.cut_rate(optimizer):
            result = call()
        names: tuple[str, ...] = _NUMBERS
        if live.ordinal % _SCAN == 0:
            gate.write("poisoned", non_finite(parameters_of([optimizer]), gate.latch.device))
            names = (*_NUMBERS, "poisoned")
        if live.held is not None:
            live.held.restore_if(gate.latch)
        starts = list(live.starts.ended)
        number = live.number_of(optimizer)
        rates = hyperparameters([optimizer])
        self.flights.append(
            LateStep(
                gate.post(names),
                optimizer,
                number,
                live.ordinal,
                live.round.number,
                starts,
                rates,
                limits,
            )
        )
        self._resolve(_LAG)
        return result

    def _judge(self, watch: Watch, optimizer: Optimizer) -> StepLimits:
        """Closes the gate if a step is bad; returns what it was held to."""
        gate = self._gate
        assert gate is not None  # noqa: S101
        norm = watch.clipped_norm
        if norm is None:
            norm = Gradients(parameters_of([optimizer])).norm(out=gate["grad_norm"])
            others = watch.round.others(optimizer)
            if others:  # if their gradients are bad, so is the step of this one
                norm = torch.add(norm, Gradients(parameters_of(others)).norm(), alpha=0)
        gate.write_step(self._loss(gate, watch), norm)
        verdicts, lane = self._live.verdicts, self._live.lane_of(optimizer)
        limits = verdicts.limits(lane, len(self.flights))
        verdicts.close_gate(gate, lane, limits)
        return limits

    def _loss(self, gate: Gate, watch: Watch) -> Tensor:
        """Returns the loss of the step that is being made."""
        losses = [loss.float() for loss in watch.losses if loss.numel() == 1]
        if not losses:
            return torch.zeros((), device=gate.latch.device)
        if len(losses) == 1:
            return losses[0]
        # A script may throw a bad batch away by itself, and go on to another one.
        fine = torch.isfinite(losses[-1]) & torch.isfinite(gate["grad_norm"])
        return torch.where(fine, losses[-1], torch.stack(losses).sum())

    def look(self) -> None:
        """Looks at every step that is still in flight."""
        self._resolve(0)

    def close(self) -> None:
        """Looks at what is left at the end."""
        try:
            self._resolve(0)
        except SystemExit:
            return

    def _resolve(self, keep: int) -> None:
        bad = self.flights.settle(keep=keep)
        if bad is not None:
            self.flights.popleft()
            self._meet(*bad)

    def _count(self, flight: LateStep, numbers: dict[str, float]) -> None:
        """Counts a good step."""
        live = self._live
        known = Numbers(numbers["loss"], numbers["grad_norm"])
        live.good_steps.add(flight.optimizer, flight.step, known, flight.rates)
        live.last_good.after_good_step()

    def _meet(self, flight: LateStep, numbers: dict[str, float]) -> None:
        gate, live = self._gate, self._live
        assert gate is not None  # noqa: S101
        behind = list(self.flights)
        self.flights.clear()
        gate.open()
        # The device has ignored it, so that it was computed with the weights there are now.
        live.starts.good = behind[0].starts if behind else []
        live.bad_steps.meet(
            Symptom.of(Reading.of(numbers), flight.limits),
            flight.optimizer,
            step=flight.step,
            ordinal=flight.ordinal,
            starts=flight.starts,
        )
        if flight.round == live.round.number:
            live.round.hold_back()
        along = [other for other in behind if other.round == flight.round]
        live.bad_steps.along += [other.ordinal for other in along]
        self._make_again(behind[len(along) :])

    def _make_again(self, behind: list[LateStep]) -> None:
        """Makes the steps that the device has ignored since a bad one, as they would have been."""
        live, lost = self._live, 0
        for place, flight in enumerate(behind):
            replayer = InPlace(
                live,
                live.patches,
                live.starts,
                flight.starts,
                step=flight.step,
                ordinal=flight.ordinal,
            )
            numbers = None
            if live.starts.is_on and not lost:
                # The one right behind was computed with the weights that it is made with now.
                with changed_rates(flight):
                    numbers = replayer.make(self._applied, exactly=place == 0)
            if numbers is None:
                lost += 1
            elif numbers["latch"]:
                self.flights.extendleft(reversed(behind[place + 1 :]))
                self._meet(flight, numbers)
                return
            else:
                self._count(flight, numbers)
        if lost:
            live.writer.say(f"{lost} steps after it were not made either: the device was ahead")

    def _applied(
        self, replay: Watch, optimizer: Optimizer, call: Callable[..., Any]
    ) -> dict[str, float]:
        """Judges a step on the device and makes it; returns its numbers."""
        self._judge(replay, optimizer)
        assert self._gate is not None  # noqa: S101
        rate = self._live.cut_rate(optimizer)
        with Gated([optimizer], self._gate.latch), rate:
            call()
        return self._gate.post(_NUMBERS).read()


@contextlib.contextmanager
def changed_rates(flight: LateStep) -> Iterator[None]:
    """Gives an optimizer the learning rates that a step was to be made with."""
    now = hyperparameters([flight.optimizer])
    set_hyperparameters([flight.optimizer], flight.rates)
    try:
        yield
    finally:
        set_hyperparameters([flight.optimizer], now)
