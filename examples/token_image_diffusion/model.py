"""A diffusion transformer over pixels: RMSNorm, AdaLN-Zero, masked attention."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from attention import Attention
from norms import NORMS
from torch import nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from settings import Settings


class Modulation(nn.Module):
    """AdaLN-Zero: shift, scale and gate of a block from the diffusion time, all 0 at first.

    Attributes:
        largest: The largest scale of the last forward pass.
    """

    def __init__(self, width: int, parts: int, bound: float | None) -> None:
        super().__init__()
        self.linear = nn.Linear(width, parts * width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.parts, self.bound = parts, bound
        self.largest = torch.zeros(())

    def forward(self, time: torch.Tensor) -> list[torch.Tensor]:
        """Returns its parts; the scales are the odd ones, and bounded where that is asked for."""
        found = list(self.linear(F.silu(time))[:, None].chunk(self.parts, -1))
        for index in range(1, self.parts, 3):
            if self.bound is not None:
                found[index] = self.bound * torch.tanh(found[index] / self.bound)
        scales = torch.stack([found[index].detach() for index in range(1, self.parts, 3)])
        self.largest = scales.abs().amax()
        return found


class Block(nn.Module):
    """Attention and a feed-forward network, both modulated by the diffusion time."""

    def __init__(self, settings: Settings, half: torch.dtype | None) -> None:
        super().__init__()
        width, norm = settings["model.width"], NORMS[settings["model.norm"]]
        self.norm1, self.norm2 = norm(width), norm(width)
        self.attention = Attention(
            width,
            settings["model.heads"],
            settings["model.attention"],
            settings["model.attention_scale"],
            half,
        )
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.modulation = Modulation(width, 6, settings["model.adaln_bound"])

    def forward(self, x: torch.Tensor, time: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Returns the pixels after the block."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(time)
        x = x + gate1 * self.attention(self.norm1(x) * (1 + scale1) + shift1, mask)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class TokenImageDiT(nn.Module):
    """Predicts a clean image from a noisy one.

    Args:
        settings: The run's settings.
        half: The type that attention scores are computed in, or None.
    """

    def __init__(self, settings: Settings, half: torch.dtype | None = None) -> None:
        super().__init__()
        width = settings["model.width"]
        rows, columns = settings["data.rows"], settings["data.columns"]
        self.width, self.columns = width, columns
        self.pixels = nn.Linear(3, width)
        self.row = nn.Parameter(0.02 * torch.randn(rows, 1, width))
        self.column = nn.Parameter(0.02 * torch.randn(1, columns, width))
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(Block(settings, half) for _ in range(settings["model.depth"]))
        self.norm = NORMS[settings["model.norm"]](width)
        self.modulation = Modulation(width, 2, settings["model.adaln_bound"])
        self.out = nn.Linear(width, 3)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, noisy: torch.Tensor, t: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Returns the prediction for every pixel.

        Args:
            noisy: Noisy pixels: text, token, channel.
            t: Diffusion time of every text, from 0 to 1.
            mask: Which pixels are tokens.
        """
        time = self.time(_waves(t, self.width))
        x = self.pixels(noisy) + (self.row + self.column).flatten(0, 1)
        x = x * mask[..., None]  # padding is empty, and stays so until something is added to it
        for block in self.blocks:
            x = block(x, time, mask)
        shift, scale = self.modulation(time)
        return self.out(self.norm(x) * (1 + scale) + shift)

    def largest_scale(self) -> float:
        """Returns the largest AdaLN scale of the last forward pass."""
        found = [block.modulation.largest for block in self.blocks]
        return float(torch.stack([*found, self.modulation.largest]).max())


def _waves(t: torch.Tensor, width: int) -> torch.Tensor:
    """Returns sines and cosines of the diffusion time."""
    span = torch.arange(width // 2, device=t.device) / (width // 2)
    angles = 1000 * t[:, None] * torch.exp(-math.log(10_000) * span)
    return torch.cat([angles.sin(), angles.cos()], -1)
