"""Steps on CUDA: judged and held back on the device, looked at by the host a little later."""

from __future__ import annotations

import math
import sys
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from nanguard.guard.gate import Gate
from nanguard.guard.optimizers import can_be_gated, gated, parameters_of
from nanguard.guard.rng import RandomStreams
from nanguard.launch.inplace import Flight, InPlace
from nanguard.numerics import Gradients, non_finite
from nanguard.tracer.symptom import Symptom

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.optim import Optimizer

    from nanguard.launch.live import Live
    from nanguard.launch.patches import Batches

# Steps the host may be behind the device, and steps between two scans of the parameters.
_LAG = 2
_SCAN = 64
_NUMBERS = ("latch", "loss", "grad_norm")


@dataclass
class _Body:
    """What belongs to the step that is being built."""

    drawn: list[tuple[Batches, Any]] = field(default_factory=list)
    streams: dict[str, Any] | None = None


class Late:
    """Keeps the device from applying bad steps, without making the host wait."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._gate: Gate | None = None
        self._streams: RandomStreams | None = None
        self._flights: deque[Flight] = deque()
        self._body = _Body()
        self._again: deque[tuple[Batches, Any]] = deque()
        self._in_place: InPlace | None = None

    def can_take(self, optimizer: Optimizer) -> bool:
        """Returns whether an optimizer's own kernel can be held back on the device."""
        first = next((p for g in optimizer.param_groups for p in g["params"]), None)
        if first is None or not first.is_cuda or not can_be_gated(optimizer):
            return False
        if self._live.together.active:
            return False  # the ranks agree on the host, and replay nothing in the run itself
        if self._gate is None:
            self._gate = Gate(first.device)
            self._streams = RandomStreams([first.device])
        return True

    def begin_step(self) -> None:
        """Begins a new step."""
        streams = None if self._streams is None else self._streams.capture()
        self._body = _Body(streams=streams)

    def drew(self, batches: Batches, batch: Any) -> None:
        """Notes a batch that the script was given."""
        if self._gate is not None:
            if not self._body.drawn and self._streams is not None:
                # Whatever a loader draws from the streams is drawn before the batch is used.
                self._body.streams = self._streams.capture()
            self._body.drawn.append((batches, batch))

    def next_batch(self, batches: Batches) -> tuple[Any] | None:
        """Returns a batch that is to be given out again, in a tuple; None if there is none."""
        if self._in_place is not None and self._in_place.owns(batches):
            batch = self._in_place.next_batch()
            if batch is not None:
                return batch
            self._in_place = None
        if self._again and self._again[0][0] is batches:
            _, batch = self._again.popleft()
            self.drew(batches, batch)
            return (batch,)
        return None

    @torch.no_grad()
    def step(self, optimizer: Optimizer, call: Callable[..., Any]) -> Any:
        """Makes a step that is a no-op on the device if it, or one before it, is bad."""
        live, gate = self._live, self._gate
        assert gate is not None  # noqa: S101 - can_take has made it
        norm = live.clipped_norm
        if norm is None:
            norm = Gradients(parameters_of([optimizer])).norm(out=gate["grad_norm"])
        gate.write("grad_norm", norm)
        gate.write("loss", self._loss(gate))
        gate.judge(sys.float_info.max, math.inf)
        with torch.enable_grad(), gated([optimizer], gate.latch), live.cut_rate(optimizer):
            result = call()
        names: tuple[str, ...] = _NUMBERS
        if live.ordinal % _SCAN == 0:
            gate.write("poisoned", non_finite(parameters_of([optimizer]), gate.latch.device))
            names = (*_NUMBERS, "poisoned")
        if live.held is not None:
            live.held.restore_if(gate.latch)
        body = self._body
        self._flights.append(
            Flight(
                gate.post(names),
                optimizer,
                live.number_of(optimizer),
                live.ordinal,
                body.drawn,
                body.streams,
            )
        )
        self._resolve(_LAG)
        return result

    def _loss(self, gate: Gate) -> Tensor:
        """Returns the loss of the step that is being made."""
        losses = [loss.float() for loss in self._live.losses if loss.numel() == 1]
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
        while len(self._flights) > keep:
            flight = self._flights.popleft()
            assert flight.ticket is not None  # noqa: S101 - steps of this kind have one
            numbers = flight.ticket.read()
            if numbers["latch"] or numbers.get("poisoned"):
                self._meet(flight, numbers)
                return
            told = {"loss": numbers["loss"], "grad_norm": numbers["grad_norm"]}
            self._live.good(flight.optimizer, flight.step, **told)

    def _meet(self, flight: Flight, numbers: dict[str, float]) -> None:
        gate, live = self._gate, self._live
        assert gate is not None  # noqa: S101
        behind = list(self._flights)
        self._flights.clear()
        for other in behind:
            # It did not happen, and its batch will come again.
            if other.drawn:
                live.take_back(other.optimizer)
        gate.open()
        bad_loss = not math.isfinite(numbers["loss"])
        value = numbers["loss"] if bad_loss else numbers["grad_norm"]
        kind = "nan" if math.isnan(value) else "inf"
        where = "parameter" if numbers.get("poisoned") else "loss" if bad_loss else "gradient"
        symptom = Symptom(where, kind, numbers["loss"], numbers["grad_norm"])
        self._again = deque(pair for other in behind for pair in other.drawn)
        live.meet(symptom, flight.optimizer, step=flight.step, ordinal=flight.ordinal)
        if flight.drawn and live.handover.wants_explanation():
            self._in_place = InPlace(live, flight, self._streams)
