"""The GradScaler's part in a step, and how a bad step leaves it as it was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.amp import GradScaler
    from torch.optim import Optimizer

    from nanguard.guard.held import Slot


class LossScaling:
    """Wraps a GradScaler, or the absence of one.

    An overflow that the scaler handles by itself (finite loss, non-finite gradient) is how
    dynamic loss scaling works and no fault. A non-finite loss is one, and so is an overflow at a
    scale of 1 or less, where the scale cannot be to blame.
    """

    def __init__(self, scaler: GradScaler | None) -> None:
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None

    @property
    def scaler(self) -> GradScaler | None:
        """The scaler, if losses are scaled."""
        return self._scaler

    @property
    def active(self) -> bool:
        """Whether losses are scaled."""
        return self._scaler is not None

    def slots(self) -> list[Slot]:
        """Returns the places of the scaler's own tensors."""
        if self._scaler is None:
            return []
        return [(vars(self._scaler), "_scale"), (vars(self._scaler), "_growth_tracker")]

    def scale(self, loss: Tensor) -> Tensor:
        """Returns the loss to call ``backward`` on."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def unscale(self, optimizers: Sequence[Optimizer]) -> None:
        """Divides the gradients by the scale, unless the user has done it already."""
        if self._scaler is None:
            return
        for optimizer in optimizers:
            if not self._found_inf(optimizer):
                self._scaler.unscale_(optimizer)

    def readings(self, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
        """Returns the scale, and whether the gradients overflowed, as 0-dim tensors."""
        if self._scaler is None:
            return {}
        scale = self._scaler._scale
        assert scale is not None  # noqa: S101 - scale() has been called before
        found = [
            flag.to(scale.device, non_blocking=True)
            for optimizer in optimizers
            for flag in self._found_inf(optimizer).values()
        ]
        return {"scale": scale.clone(), "overflow": torch.stack(found).amax()}

    def unscaled(self, loss: Tensor) -> Tensor:
        """Returns a loss as it was before it was scaled."""
        if self._scaler is None or self._scaler._scale is None:
            return loss
        return loss / self._scaler._scale

    def seen(self, optimizers: Sequence[Optimizer], norm: Tensor) -> dict[str, Tensor]:
        """Returns the readings of a step that somebody else makes.

        Where its gradients are not unscaled yet, ``factor`` is what their norm is too large by.

        Args:
            optimizers: Whose step it is.
            norm: The norm of their gradients as they are.
        """
        if self._scaler is None or self._scaler._scale is None:
            return {}
        if all(self._found_inf(optimizer) for optimizer in optimizers):
            return self.readings(optimizers)
        scale = self._scaler._scale
        overflow = (~torch.isfinite(norm)).to(scale)
        return {"scale": scale.clone(), "overflow": overflow, "factor": scale}

    def overflow(self, optimizers: Sequence[Optimizer]) -> None:
        """Makes a scaler skip the step that it is about to take by itself."""
        if self._scaler is None:
            return
        for optimizer in optimizers:
            first = next(p for group in optimizer.param_groups for p in group["params"])
            first.grad = torch.full_like(first, float("inf"))

    def update(self) -> None:
        """Lets the scaler grow or back off."""
        if self._scaler is not None:
            self._scaler.update()

    def forget(self) -> None:
        """Drops what the scaler recorded about this step and keeps its scale as it is."""
        if self._scaler is not None:
            self._scaler._per_optimizer_states.clear()

    def state_dict(self) -> dict[str, Any] | None:
        """Returns the scaler's numbers as they lie on the device; None without a scaler."""
        if self._scaler is None:
            return None
        if self._scaler._scale is None:
            return {"scale": self._scaler._init_scale, "growth": self._scaler._init_growth_tracker}
        return {"scale": self._scaler._scale, "growth": self._scaler._growth_tracker}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continues from what ``state_dict`` returned."""
        if self._scaler is None or state is None:
            return
        full = self._scaler.state_dict()
        full["scale"] = float(state["scale"])
        full["_growth_tracker"] = int(state["growth"])
        self._scaler.load_state_dict(full)

    def _found_inf(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Returns what unscaling found out, by device; empty before it was done."""
        assert self._scaler is not None  # noqa: S101 - callers have checked
        return self._scaler._found_inf_per_device(optimizer)
