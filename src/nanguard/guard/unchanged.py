"""Everything a bad step leaves unchanged, apart from what the optimizer itself writes.

The moving average of the weights is among it: how it is updated, and what it is made of.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from nanguard.errors import UsageError
from nanguard.guard.held import BufferPlaces, FixedPlaces, Held
from nanguard.guard.optimizers import hyperparameters, parameters_of, set_hyperparameters
from nanguard.numerics import local

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from nanguard.guard.held import Shape, Slot
    from nanguard.guard.optimizers import LossScaling
    from nanguard.guard.rng import RandomStreams


class Average:
    """Wraps whatever the user keeps a moving average with.

    Known forms: ``torch.optim.swa_utils.AveragedModel``; anything with ``update(model)`` or
    ``update()`` (timm, torch_ema, ema-pytorch); anything with ``step(parameters)`` (diffusers);
    a pair of a module and a function that updates it.
    """

    def __init__(self, ema: Any, models: Sequence[nn.Module]) -> None:
        self._of = ema[0] if isinstance(ema, tuple) else ema
        self._update = _updater(ema, models[0])
        self._checked = False
        self._model = {id(p) for p in models[0].parameters()}
        self._foreign = {id(t) for model in models for t in (*model.parameters(), *model.buffers())}

    def follows(self, optimizer: Optimizer) -> bool:
        """Returns whether an optimizer trains the model that is averaged."""
        return any(id(p) in self._model for p in parameters_of([optimizer]))

    def update(self) -> bool:
        """Takes the current weights in; returns whether the average put new objects in place."""
        before = self._held_objects()
        self._update()
        if not self._checked:
            self._checked = True
            self._check_found()
        return self._held_objects() != before

    def _held_objects(self) -> list[int]:
        return [id(value) for value in vars(self._of).values() if not _is_number(value)]

    def _check_found(self) -> None:
        if not self.slots():
            raise UsageError(
                f"nanguard finds no tensors in the EMA of type {type(self._of).__name__}.",
                where="Guard(ema=...)",
                do="Give ema=(ema_model, update), where update() takes the current weights in.",
            )

    def slots(self) -> list[Slot]:
        """Returns the places of the average's own tensors."""
        return list(_places(self._of, self._foreign, set()))

    def counters(self) -> dict[str, Any]:
        """Returns the plain numbers the average keeps about itself, by where they are."""
        return {path: container[key] for path, container, key in self._numbers()}

    def set_counters(self, counters: dict[str, Any]) -> None:
        """Puts back what ``counters`` returned."""
        for path, container, key in self._numbers():
            if path in counters:
                container[key] = counters[path]

    def _numbers(self) -> list[tuple[str, Any, Any]]:
        return list(_numbers(self._of, "", self._foreign, set()))

    def tensors(self) -> list[Tensor]:
        """Returns the average's own tensors."""
        return [container[key] for container, key in self.slots()]

    def state_dict(self) -> dict[str, Any]:
        """Returns the average, with its live tensors."""
        return {"tensors": self.tensors(), "counters": self.counters()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from what ``state_dict`` returned."""
        if state["tensors"] and not self.slots():
            self._update()  # some averages are made by their first update
        if state["tensors"]:
            for live, saved in zip(self.tensors(), state["tensors"], strict=True):
                local(live).copy_(local(saved))
        self.set_counters(state["counters"])


def _updater(ema: Any, model: nn.Module) -> Callable[[], Any]:
    if isinstance(ema, tuple):
        if len(ema) != 2 or not callable(ema[1]):
            raise UsageError(
                f"ema is a tuple of {len(ema)}, not of a module and a function that updates it.",
                where="Guard(ema=...)",
                do="Give ema=(ema_model, update), where update() takes the weights in.",
            )
        update: Callable[[], Any] = ema[1]
        return update
    for name in ("update_parameters", "update"):
        method = getattr(ema, name, None)
        if callable(method):
            return partial(method, model) if _needs_argument(method) else method
    step = getattr(ema, "step", None)
    if callable(step):
        return lambda: step(model.parameters())
    raise UsageError(
        f"nanguard does not know how to update an EMA of type {type(ema).__name__}.",
        where="Guard(ema=...)",
        do="Give ema=(ema_model, update), where update() takes the current weights in.",
    )


def _needs_argument(method: Callable[..., Any]) -> bool:
    parameters = inspect.signature(method).parameters.values()
    return any(
        p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        for p in parameters
    )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float))


def _places(value: Any, foreign: set[int], seen: set[int]) -> Iterator[Slot]:
    """Yields where tensors hang below an object, without those of the trained model."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        for module in value.modules():
            for registry in (module._parameters, module._buffers):
                yield from _own(registry, registry.items(), foreign)
        return
    inner = value if isinstance(value, (dict, list, tuple)) else vars(value)
    items = list(inner.items() if isinstance(inner, dict) else enumerate(inner))
    yield from _own(inner, items, foreign)
    for _, held in items:
        if _belongs(held, foreign):
            yield from _places(held, foreign, seen)


def _numbers(
    value: Any, path: str, foreign: set[int], seen: set[int]
) -> Iterator[tuple[str, Any, Any]]:
    """Yields where plain numbers hang below an object; those of modules are not among them."""
    if id(value) in seen:
        return
    seen.add(id(value))
    inner = value if isinstance(value, (dict, list)) else vars(value)
    for key, held in list(inner.items() if isinstance(inner, dict) else enumerate(inner)):
        if _is_number(held) and key != "training":
            yield f"{path}/{key}", inner, key
        elif not isinstance(held, (torch.Tensor, nn.Module, tuple)) and _belongs(held, foreign):
            yield from _numbers(held, f"{path}/{key}", foreign, seen)


def _own(container: Any, items: Any, foreign: set[int]) -> Iterator[Slot]:
    for key, tensor in list(items):
        if isinstance(tensor, torch.Tensor) and id(tensor) not in foreign:
            yield container, key


def _belongs(held: Any, foreign: set[int]) -> bool:
    """Returns whether what hangs below an average is a part of it, and not of the run around it."""
    if isinstance(held, (dict, list, tuple)):
        return True
    if isinstance(held, nn.Module):
        return not _is_model(held, foreign)
    plain = hasattr(held, "__dict__") and not callable(held) and not isinstance(held, torch.Tensor)
    return plain and not any(
        isinstance(value, Optimizer) or _is_model(value, foreign) for value in vars(held).values()
    )


def _is_model(held: Any, foreign: set[int]) -> bool:
    return isinstance(held, nn.Module) and any(id(p) in foreign for p in held.parameters())


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
