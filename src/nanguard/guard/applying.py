"""Applying a step: through the gate, after a host read, or with a closure that can be undone."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nanguard.guard.optimizers import gated, parameters_of, scaled_lr, state_tensors
from nanguard.numerics import all_finite, local

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from nanguard.guard.scaling import LossScaling
    from nanguard.numerics import Gradients


def apply_gated(
    optimizers: Sequence[Optimizer], closed: Tensor, scaling: LossScaling, lr_factor: float
) -> None:
    """Steps fused optimizers; on the device it is a no-op if a 0-dim flag there is set."""
    with scaled_lr(optimizers, lr_factor), gated(optimizers, closed):
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
