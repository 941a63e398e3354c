"""A copy of the last good state of a run, in memory, for ``--on-bad rollback``."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from nanguard.guard.optimizers import state_tensors
from nanguard.numerics import all_finite

if TYPE_CHECKING:
    from torch import Tensor

    from nanguard.replay.watch import Watch

# Good steps between two copies.
_EVERY = 100


class LastGood:
    """Parameters, buffers and optimizer state of a good step."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._steps = 0
        self._tensors: list[tuple[Tensor, Tensor]] = []
        self._states: list[tuple[Any, dict[Any, Any]]] = []

    @property
    def is_there(self) -> bool:
        """Whether there is a state to go back to."""
        return bool(self._tensors)

    def after_good_step(self) -> None:
        """Takes a copy now and then."""
        if self._steps % _EVERY == 0:
            self.take()
        self._steps += 1

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
