"""Copies of what training moves: parameters, buffers and optimizer state, and how they go back."""

from __future__ import annotations

import copy
import math
import time
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from nanguard.guard.optimizers import state_tensors
from nanguard.numerics import all_finite
from nanguard.replay.changes import set_version

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor
    from torch.optim import Optimizer

    from nanguard.replay.watch import Watch

# Bytes of parameters that are copied before a replay. Steps of larger models rarely write to them.
MOST_COPIED = 256 << 20
# Good steps between two copies, if they are wanted.
_EVERY = 100
# Copies that are taken as an optimizer has become another one; some scripts make one in each step.
_MOST_NEWS = 64
# Bytes that are copied without being asked for, and the part of the time that it may take.
_SMALL = 16 << 20
_SHARE = 0.0005


def bytes_in(tensors: Iterable[Tensor]) -> int:
    """Returns how many bytes some tensors take."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class StateCopy:
    """Tensors and the state of optimizers as they are now. They can go back any number of times."""

    @torch.no_grad()
    def __init__(self, tensors: Iterable[Tensor], optimizers: Iterable[Optimizer]) -> None:
        self._tensors = [(tensor, tensor._version, _copy(tensor)) for tensor in tensors]
        self._states = [
            (optimizer, {p: _copies(state) for p, state in optimizer.state.items()})
            for optimizer in optimizers
        ]

    @torch.no_grad()
    def put_back(self, *, unnoticed: bool = False) -> None:
        """Makes everything what it was.

        Args:
            unnoticed: Whether autograd is to believe that nothing has happened in between.
        """
        for tensor, version, before in self._tensors:
            tensor.copy_(before)
            if unnoticed:
                set_version(tensor, version)
        for optimizer, states in self._states:
            for parameter in [p for p in optimizer.state if p not in states]:
                del optimizer.state[parameter]
            for parameter, kept in states.items():
                state = optimizer.state[parameter]
                state.clear()
                for name, (value, before) in kept.items():
                    if isinstance(value, torch.Tensor):
                        value.copy_(before)
                    state[name] = (
                        value if isinstance(value, torch.Tensor) else copy.deepcopy(before)
                    )


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _copies(state: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns the values of a parameter's state, each with a copy of it."""
    return {
        name: (value, _copy(value) if isinstance(value, torch.Tensor) else copy.deepcopy(value))
        for name, value in state.items()
    }


def why_not_copied(parameters: Iterable[Tensor]) -> str | None:
    """Returns why a replay might write to parameters that nobody has a copy of."""
    found = list(parameters)
    hooked = any(getattr(p, "_post_accumulate_grad_hooks", None) for p in found)
    if hooked and bytes_in(found) > MOST_COPIED:
        return "gradients have hooks that may write to the parameters, of which there is no copy"
    return None


class Written:
    """Parameters as they are, in case a step writes to them by itself."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        found = [p for p in parameters if type(p) in (torch.Tensor, torch.nn.Parameter)]
        copies = bytes_in(found) <= MOST_COPIED
        self._before = [(p, p._version, p.detach().clone() if copies else None) for p in found]

    def put_back(self) -> None:
        """Undoes what was written."""
        with torch.no_grad():
            for parameter, version, before in self._before:
                if parameter._version != version and before is not None:
                    parameter.copy_(before)
                    set_version(parameter, version)


def _shape_of(optimizer: Optimizer) -> tuple[int, int]:
    """Returns how many parameters an optimizer trains, and of how many it knows something."""
    return sum(len(group["params"]) for group in optimizer.param_groups), len(optimizer.state)


class LastGood:
    """The last good state of a run, in memory.

    With ``--on-bad rollback`` there is always one. Otherwise there is one if it costs next to
    nothing: some scripts write to their weights by themselves, and some optimizers divide by zero.
    """

    def __init__(self, watch: Watch, *, wanted: bool) -> None:
        self._watch = watch
        self._wanted = wanted
        self._due = 0.0
        self._steps = 0
        self._copy: StateCopy | None = None
        # For each optimizer, how much it trained and knew when the copy was taken, and how often a
        # copy was taken as that had changed.
        self._holds: weakref.WeakKeyDictionary[Optimizer, tuple[int, int]]
        self._holds = weakref.WeakKeyDictionary()
        self._news = 0

    @property
    def is_there(self) -> bool:
        """Whether there is a state to go back to."""
        return self._copy is not None

    def before_step(self, optimizer: Optimizer) -> None:
        """Takes a copy of what has never moved: some optimizers divide by zero at once.

        That is so in the first step of an optimizer, and where it was given more to train, or its
        state was emptied.
        """
        known, now = self._holds.get(optimizer), _shape_of(optimizer)
        if now == known or self._news >= _MOST_NEWS:
            return
        self._news += 1
        self._holds[optimizer] = now
        if self._is_small():
            self.take()

    def after_good_step(self) -> None:
        """Takes a copy now and then."""
        if self._wanted:
            if self._steps % _EVERY == 0:
                self.take()
            self._steps += 1
            return
        began = time.perf_counter()
        if began >= self._due:
            small = self._is_small()
            if small:
                self.take()
            took = time.perf_counter() - began
            self._due = began + took / _SHARE if small else math.inf

    def _is_small(self) -> bool:
        tensors = [*self._trained(), *state_tensors(self._watch.optimizers())]
        plain = all(type(t.data) is torch.Tensor and t.device.type == "cpu" for t in tensors)
        # Ranks that go back have to go back to the same step.
        alone = not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1
        return plain and alone and bytes_in(tensors) <= _SMALL

    def _trained(self) -> list[Tensor]:
        return [*self._watch.named_parameters().values(), *self._watch.buffers().values()]

    def take(self) -> None:
        """Copies the state, if all of it is finite."""
        trained, optimizers = self._trained(), self._watch.optimizers()
        if all_finite([*trained, *state_tensors(optimizers)]):
            self._copy = StateCopy(trained, optimizers)
            for optimizer in optimizers:
                self._holds[optimizer] = _shape_of(optimizer)

    def restore(self) -> None:
        """Goes back."""
        if self._copy is not None:
            self._copy.put_back()
