"""A linear VAE of the maps' patches.

The best linear VAE is known in closed form: probabilistic PCA. So it is computed from the data
once, and kept beside the run, instead of being trained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from pathlib import Path

PATCH = 4


class LinearVae(nn.Module):
    """Encodes patches of 4 x 4 pixels into a few numbers, and decodes them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("encoder", torch.zeros(channels, 1, PATCH, PATCH))
        self.register_buffer("decoder", torch.zeros(channels, 1, PATCH, PATCH))
        self.register_buffer("mean", torch.zeros(1, 1, PATCH, PATCH))
        self.register_buffer("log_variance", torch.zeros(channels))
        self.register_buffer("scale", torch.ones(1, channels, 1, 1))

    def encode(self, radio: torch.Tensor) -> torch.Tensor:
        """Returns latents drawn from the posterior, scaled to spread 1."""
        mean = self.posterior_mean(radio)
        spread = torch.exp(0.5 * self.log_variance).view(1, -1, 1, 1)
        noise = torch.randn(mean.shape, device=mean.device)
        return (mean + spread * noise) * self.scale

    def posterior_mean(self, radio: torch.Tensor) -> torch.Tensor:
        """Returns the mean of the posterior."""
        offset = F.conv2d(self.mean, self.encoder)
        return F.conv2d(radio, self.encoder, stride=PATCH) - offset

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Returns maps."""
        height, width = latents.shape[-2], latents.shape[-1]
        patches = F.conv_transpose2d(latents / self.scale, self.decoder, stride=PATCH)
        return patches + self.mean.repeat(1, 1, height, width)

    def set_scale(self, factor: float | str, first: torch.Tensor) -> None:
        """Sets what latents are multiplied by.

        Args:
            factor: The factor, or ``auto`` for one per channel that gives a batch spread 1.
            first: The maps of that batch.
        """
        if factor == "auto":
            spread = self.posterior_mean(first).std(dim=(0, 2, 3), keepdim=True)
            self.scale.copy_(1.0 / spread)
        else:
            self.scale.fill_(float(factor))


def fit(radio: np.ndarray, channels: int) -> LinearVae:
    """Returns the VAE of maps of shape (n, size, size); those that are not finite do not count."""
    radio = radio[np.isfinite(radio).all(axis=(1, 2))]
    side = radio.shape[-1] // PATCH
    patches = radio.reshape(-1, side, PATCH, side, PATCH).transpose(0, 1, 3, 2, 4)
    patches = patches.reshape(-1, PATCH * PATCH).astype(np.float64)
    mean = patches.mean(0)
    values, vectors = np.linalg.eigh(np.cov(patches - mean, rowvar=False))
    values, vectors = values[::-1].clip(1e-8), vectors[:, ::-1]
    vectors = vectors * np.where(vectors.sum(0) < 0, -1, 1)  # eigh leaves the sign open
    noise = values[channels:].mean()
    kept, axes = values[:channels], vectors[:, :channels].T
    spread = np.sqrt(np.maximum(kept - noise, 1e-8))
    vae = LinearVae(channels)
    vae.decoder.copy_(_filters(axes * spread[:, None]))
    vae.encoder.copy_(_filters(axes * (spread / kept)[:, None]))
    vae.mean.copy_(_filters(mean[None]))
    vae.log_variance.copy_(torch.from_numpy(np.log(noise / kept)))
    return vae


def _filters(rows: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(rows)).float().view(-1, 1, PATCH, PATCH)


def load_or_fit(radio: np.ndarray, channels: int, path: Path) -> LinearVae:
    """Returns the VAE of a run; computes it where the run has none yet."""
    if path.exists():
        vae = LinearVae(channels)
        vae.load_state_dict(torch.load(path, weights_only=True))
        return vae
    vae = fit(radio, channels)
    partial = path.with_suffix(".partial")
    torch.save(vae.state_dict(), partial)
    partial.replace(path)
    return vae
