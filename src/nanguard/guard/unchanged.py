"""Everything a bad step leaves unchanged, apart from what the optimizer itself writes."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nanguard.guard.held import BufferPlaces, FixedPlaces, Held
from nanguard.guard.optimizers import hyperparameters, set_hyperparameters

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from nanguard.guard.ema import Average
    from nanguard.guard.held import Shape
    from nanguard.guard.rng import RandomStreams
    from nanguard.guard.scaling import LossScaling


@dataclass(slots=True)
class Mark:
    """How the host's side of a run was before a step.

    Attributes:
        streams: The random streams.
        hyperparameters: What schedulers write into the parameter groups.
        schedules: The schedulers' own states.
        counters: The numbers the EMA keeps about itself.
        loose: Tensors on another device than the latch, with copies.
        shapes: Which tensors were where.
    """

    streams: dict[str, Any]
    hyperparameters: list[dict[str, Any]] = field(default_factory=list)
    schedules: list[dict[str, Any]] = field(default_factory=list)
    counters: dict[str, Any] = field(default_factory=dict)
    loose: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    shapes: list[Shape] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Returns what can be written to a file and is not in the user's own checkpoint."""
        return {
            "streams": self.streams,
            "hyperparameters": self.hyperparameters,
            "schedules": self.schedules,
            "counters": self.counters,
        }


class Unchanged:
    """Remembers how things were before a step and puts them back after a bad one.

    Buffers and the loss scale are put back on the device, by the latch. Random streams,
    schedules and counters live on the host and are put back when the host learns of the step.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[Any],
        streams: RandomStreams,
        scaling: LossScaling,
        average: Average | None,
    ) -> None:
        self.streams = streams
        self._optimizers = optimizers
        self._schedulers = schedulers
        self._average = average
        self._places = BufferPlaces(models)
        self._held = [Held(self._places)]
        if scaling.active:
            self._held.append(Held(FixedPlaces(scaling.slots)))
        self._held_average = None
        if average is not None:
            self._held_average = Held(FixedPlaces(average.slots))

    def hold(self) -> None:
        """Copies the tensors that a step changes before its verdict is known."""
        for held in self._held:
            held.mark()

    def mark(self) -> Mark:
        """Remembers the rest of what such a step changes, if the host is never late."""
        return Mark(self.streams.capture(), shapes=[held.shape for held in self._held])

    def mark_for_late_host(self, latch: Tensor) -> Mark:
        """Remembers everything a step and the gated ones behind it may change."""
        mark = self.mark()
        mark.hyperparameters = hyperparameters(self._optimizers)
        mark.schedules = [_copied(scheduler.state_dict()) for scheduler in self._schedulers]
        mark.loose = [pair for held in self._held for pair in held.loose(latch)]
        if self._average is not None:
            mark.counters = self._average.counters()
            mark.loose += [
                (tensor, tensor.clone())
                for tensor in self._average.tensors()
                if tensor.device.type != latch.device.type
            ]
        return mark

    def restore(self, mark: Mark, *, streams: bool = True) -> None:
        """Puts back what a mark remembers."""
        for held, shape in zip(self._held, mark.shapes, strict=True):
            held.restore(shape)
        for tensor, before in mark.loose:
            tensor.detach().copy_(before)
        self._restore_host(mark, streams=streams)

    def _restore_host(self, mark: Mark, *, streams: bool = True) -> None:
        if streams:
            self.streams.restore(mark.streams)
        if mark.hyperparameters:
            set_hyperparameters(self._optimizers, mark.hyperparameters)
        for scheduler, state in zip(self._schedulers, mark.schedules, strict=False):
            scheduler.load_state_dict(state)
        if self._average is not None:
            self._average.set_counters(mark.counters)

    def restore_schedules(self, mark: Mark, *, scale: bool) -> None:
        """Puts back what a framework moves after a step, whether that was made or not.

        Args:
            mark: How it was before.
            scale: Whether the loss scale goes back, too; a loss in use may depend on it.
        """
        if scale:
            for held, shape in zip(self._held[1:], mark.shapes[1:], strict=True):
                held.restore(shape)
        self._restore_host(mark, streams=False)

    def load(self, saved: dict[str, Any]) -> None:
        """Puts back what a mark of another process remembers."""
        self._restore_host(Mark(**saved))

    def look_again(self) -> None:
        """Makes the next mark look for buffers that came or went unnoticed."""
        for held in self._held:
            held.look_again()

    def close(self) -> None:
        """Stops listening for buffers and modules."""
        self._places.close()

    def restore_if(self, latch: Tensor) -> None:
        """Puts back, on the device, what lives there, if the latch is set."""
        for held in self._held:
            held.restore_if(latch)

    def update_average(self, latch: Tensor | None, optimizers: Sequence[Optimizer]) -> None:
        """Takes the weights into the EMA, unless the latch, where there is one, is set.

        Args:
            latch: The verdict on the device; None if the step is known to be good.
            optimizers: Those that have just stepped; the EMA follows the model they train.
        """
        if self._average is None or self._held_average is None:
            return
        if not any(self._average.follows(optimizer) for optimizer in optimizers):
            return
        if latch is None:
            self._average.update()
            return
        self._held_average.mark()
        if self._average.update():
            self._held_average.follow()
        self._held_average.restore_if(latch)
        self._held_average.release()


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """Returns a scheduler's state with containers of its own."""
    return {key: _copied_value(value) for key, value in state.items()}


def _copied_value(value: Any) -> Any:
    if type(value) is dict:
        return _copied(value)
    if type(value) is list:
        return [_copied_value(item) for item in value]
    # Counter, OrderedDict and the like keep their type.
    return copy.copy(value) if isinstance(value, (dict, list)) else value
