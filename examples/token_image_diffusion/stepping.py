"""Makes the optimizer's step: clipping, the loss scale, and what was done about bad gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from settings import Settings


def make_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    settings: Settings,
) -> tuple[float, list[str]]:
    """Clips, steps and clears the gradients.

    Returns:
        Their norm before it was clipped, and the names of the bad ones that were zeroed.
    """
    bad: list[str] = []
    limit = settings["training.max_grad_norm"] or float("inf")
    if settings["training.clip_order"] == "before-unscale":
        norm = clip_scaled(model, optimizer, scaler, limit)
    elif settings["training.bad_gradients"] == "zero":
        norm, bad = zero_bad(model, optimizer, scaler, limit)
    else:
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
        scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return float(norm), bad


def clip_scaled(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    limit: float,
) -> torch.Tensor:
    """Clips gradients that are still multiplied by the loss scale: to almost nothing."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    return norm


def zero_bad(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    limit: float,
) -> tuple[torch.Tensor, list[str]]:
    """Zeroes bad gradients, and steps all the same."""
    scaler.unscale_(optimizer)
    bad = []
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
            bad.append(name)
            parameter.grad.zero_()
    norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
    optimizer.step()
    return norm, bad
