"""What is trained: the masked words, and the latents without their noise."""

from __future__ import annotations

import math

import torch
from data import MASK
from torch.nn import functional as F


def corrupt(batch, smallest, largest, generator=None):
    """Masks words and adds noise to latents; returns what the model sees, and the mask."""
    tokens, latents = batch["tokens"], batch["latents"]
    how = {"device": tokens.device, "generator": generator}
    keep = torch.arange(tokens.shape[1], device=tokens.device) < batch["length"][:, None]
    ratio = smallest + (largest - smallest) * torch.rand(len(tokens), 1, **how)
    masked = (torch.rand(tokens.shape, **how) < ratio) & keep
    time = torch.rand(len(tokens), **how)
    angle = (math.pi / 2 * time)[:, None, None]
    noisy = angle.cos() * latents + angle.sin() * torch.randn(latents.shape, **how)
    return (torch.where(masked, MASK, tokens), keep, noisy, time), masked


def masked_cross_entropy(logits, tokens, masked, form):
    """The mean over the masked words."""
    nll = F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten(), reduction="none")
    chosen = nll.view_as(tokens) * masked
    if form == "safe":
        return chosen.sum() / masked.sum().clamp(min=1)
    summed = chosen.sum()
    return summed / masked.sum()


def latent_error(predicted, latents, form):
    """The mean squared error of the latents, or of their directions."""
    predicted = predicted.float()
    if form == "normalised":
        predicted = predicted / predicted.norm(dim=-1, keepdim=True)
        latents = latents / latents.norm(dim=-1, keepdim=True)
    return F.mse_loss(predicted, latents)


def bounded(loss, bound):
    """A term of the loss that is never shown above a bound."""
    return loss if bound is None else torch.clamp(loss, max=bound)
