"""The diffusion: how maps become noise, what the network is asked, and how maps are drawn.

With x0 the latents and C = -x0, the latents at time t are ``x0 + C t + sqrt(t) noise``: the map at
t = 0, pure noise at t = 1. The network predicts C and the noise; both errors are weighted by t.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Callable

    from settings import Model
    from torch import nn

    Weigh = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class BadTensor(Exception):
    """A tensor of the loss that is not finite."""


@dataclass
class Losses:
    """The terms of one batch, and what is worth watching about them."""

    simple: torch.Tensor
    vlb: torch.Tensor
    total: torch.Tensor
    watched: dict[str, torch.Tensor]


def loss_weights(
    t: torch.Tensor, eps: float, most: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weights of the two errors.

    Args:
        t: Diffusion times in (0, 1].
        eps: Keeps the second weight finite at t = 1.
        most: Bound of both weights; None for none.
    """
    weight_c = (t + 1) / t.sqrt()
    weight_noise = (2 - t).sqrt() / (1 - t + eps).sqrt()
    if most is not None:
        weight_c, weight_noise = weight_c.clamp(max=most), weight_noise.clamp(max=most)
    return weight_c, weight_noise


def draw_times(x: torch.Tensor, settings: Model) -> torch.Tensor:
    """Returns a diffusion time for each sample, on the grid of the time steps."""
    first = settings.first_timestep
    steps = torch.randint(first, first + settings.timesteps, (len(x),), device=x.device)
    return (steps / settings.timesteps).to(x.dtype)


def noisy(x0: torch.Tensor, t: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Returns the latents at times t."""
    t = t.view(-1, 1, 1, 1)
    return x0 - x0 * t + t.sqrt() * noise


def losses(
    network: nn.Module,
    x0: torch.Tensor,
    condition: torch.Tensor,
    street: torch.Tensor,
    settings: Model,
    *,
    weigh: Weigh | None = None,
    check: bool = False,
) -> Losses:
    """Returns the loss of a batch.

    Args:
        network: Predicts C and the noise.
        x0: The latents.
        condition: Buildings and distance.
        street: The share of each latent that lies outside of buildings: only it counts.
        settings: The diffusion.
        weigh: Returns the two weights of diffusion times; those of the settings if not given.
        check: Whether every tensor is looked at on the way.

    Raises:
        BadTensor: A tensor that was looked at is not finite.
    """
    t, noise = draw_times(x0, settings), torch.randn_like(x0)
    x = noisy(x0, t, noise)
    if check:
        check_finite(latents=x0, condition=condition, street=street, t=t, noise=noise, noisy=x)
    c, predicted = network(x, t, condition)
    c, predicted, target = (bounded(one, settings.prediction_bound) for one in (c, predicted, -x0))
    if weigh is None:
        eps, most = settings.loss_weight_eps, settings.loss_weight_max
        weight_c, weight_noise = loss_weights(t, eps, most)
    else:
        weight_c, weight_noise = weigh(t)
    if check:
        check_finite(c=c, predicted=predicted, weight_c=weight_c, weight_noise=weight_noise)
    error_c = weight_c.view(-1, 1, 1, 1) * (c - target) ** 2
    error_noise = weight_noise.view(-1, 1, 1, 1) * (predicted - noise) ** 2
    simple = ((error_c + error_noise) * street).mean()
    vlb = torch.zeros_like(simple)
    if settings.loss_vlb_weight:
        again = rebuilt(x, c, predicted, t)
        vlb = settings.loss_vlb_weight * ((again - x0).abs() * street).mean()
    watched = {
        "t_min": t.min(),
        "weight_max": torch.maximum(weight_c.max(), weight_noise.max()),
        "latent_max": x0.abs().max(),
        "prediction_max": torch.maximum(c.detach().abs().max(), predicted.detach().abs().max()),
    }
    return Losses(simple, vlb, simple + vlb, watched)


def bounded(x: torch.Tensor, most: float | None) -> torch.Tensor:
    """Returns a tensor with nothing beyond a bound in it; None is no bound."""
    return x if most is None else x.clamp(-most, most)


def rebuilt(x: torch.Tensor, c: torch.Tensor, noise: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """Returns the latents at t = 0 that predictions at times t lead to."""
    t = t.view(-1, 1, 1, 1)
    return x - c * t - t.sqrt() * noise


def check_finite(**tensors: torch.Tensor) -> None:
    """Raises if one of the tensors is not finite, with its name and the samples at fault."""
    for name, tensor in tensors.items():
        bad = ~torch.isfinite(tensor.detach())
        if bad.any():
            rows = torch.nonzero(bad.view(len(bad), -1).any(1)).flatten().tolist()
            shown = ", ".join(map(str, rows[:8]))
            raise BadTensor(
                f"{name}: {int(bad.sum())} of {bad.numel()} values are not finite "
                f"(sample {shown} of the batch)"
            )


def shrink(street: torch.Tensor, size: int) -> torch.Tensor:
    """Returns the share of each latent that lies outside of buildings."""
    return F.adaptive_avg_pool2d(street, size)


@torch.no_grad()
def draw_maps(
    network: nn.Module, condition: torch.Tensor, shape: tuple[int, ...], steps: int, seed: int
) -> torch.Tensor:
    """Returns latents of maps that fit the conditions, from noise in a few steps."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator).to(condition.device)
    times = torch.linspace(1, 0, steps + 1).tolist()
    for now, then in itertools.pairwise(times):
        c, noise = network(x, x.new_full((len(x),), now), condition)
        x = x - (now - then) * c - (now**0.5 - then**0.5) * noise
    return x
