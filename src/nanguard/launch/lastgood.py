"""A copy of the last good state of a run, in memory.

With ``--on-bad rollback`` there is always one. Otherwise there is one if it costs next to nothing:
some scripts write to their weights by themselves, and some optimizers divide by zero.
"""

from __future__ import annotations

import copy
import math
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from nanguard.guard.optimizers import state_tensors
from nanguard.numerics import all_finite

if TYPE_CHECKING:
    from torch import Tensor

    from nanguard.replay.watch import Watch

# Good steps between two copies, if they are wanted.
_EVERY = 100
# Bytes that are copied without being asked for, and the part of the time that it may take.
_SMALL = 16 << 20
_SHARE = 0.005


class LastGood:
    """Parameters, buffers and optimizer state of a good step."""

    def __init__(self, watch: Watch, *, wanted: bool) -> None:
        self._watch = watch
        self._wanted = wanted
        self._due = 0.0
        self._steps = 0
        self._tensors: list[tuple[Tensor, Tensor]] = []
        self._states: list[tuple[Any, dict[Any, Any]]] = []

    @property
    def is_there(self) -> bool:
        """Whether there is a state to go back to."""
        return bool(self._tensors)

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
        tensors = [*self._watch.named_parameters().values(), *self._watch.buffers().values()]
        tensors += state_tensors(self._watch.optimizers())
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        plain = all(type(t.data) is torch.Tensor and t.device.type == "cpu" for t in tensors)
        # Ranks that go back have to go back to the same step.
        alone = not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1
        return plain and alone and size <= _SMALL

    @torch.no_grad()
    def take(self) -> None:
        """Copies the state, if all of it is finite."""
        live = [*self._watch.named_parameters().values(), *self._watch.buffers().values()]
        optimizers = self._watch.optimizers()
        if not all_finite([*live, *state_tensors(optimizers)]):
            return
        self._tensors = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in live]
        self._states = [
            (optimizer, {p: copy.deepcopy(state) for p, state in optimizer.state.items()})
            for optimizer in optimizers
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Goes back."""
        for tensor, before in self._tensors:
            tensor.copy_(before)
        for optimizer, states in self._states:
            optimizer.state.clear()
            for parameter, state in states.items():
                optimizer.state[parameter] = copy.deepcopy(state)
