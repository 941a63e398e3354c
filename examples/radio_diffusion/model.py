"""The denoiser: a U-Net over latents, conditioned on buildings, transmitter and time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from settings import Model

_CONDITIONS = 2  # buildings, distance
_SHRINK = 4  # a latent stands for so many pixels in each direction


class Block(nn.Module):
    """Two convolutions around a shift that depends on the time; what came in is added."""

    def __init__(self, inner: int, outer: int, time: int, norm: str) -> None:
        super().__init__()
        self.norm1, self.norm2 = _norm(norm, inner), _norm(norm, outer)
        self.conv1 = nn.Conv2d(inner, outer, 3, padding=1)
        self.conv2 = nn.Conv2d(outer, outer, 3, padding=1)
        self.shift = nn.Linear(time, outer)
        self.skip = nn.Conv2d(inner, outer, 1) if inner != outer else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """Returns features of the same size."""
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.shift(time)[:, :, None, None]
        h = self.conv2(F.silu(self.norm2(h)))
        return self.skip(x) + h


class Denoiser(nn.Module):
    """Predicts C = -x0 and the noise from a noisy latent."""

    def __init__(self, settings: Model, channels: int) -> None:
        super().__init__()
        width, norm = settings.width, settings.norm
        widths = [width * factor for factor in settings.multipliers]
        time = 4 * width
        self.width = width
        self.condition = nn.Sequential(
            nn.Conv2d(_CONDITIONS, width, _SHRINK, stride=_SHRINK),
            nn.SiLU(),
            nn.Conv2d(width, width, 3, padding=1),
        )
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.enter = nn.Conv2d(channels + width, width, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        inner = width
        for outer in widths:
            self.down.append(_level(inner, outer, time, settings))
            inner = outer
        for outer in reversed(widths):
            self.up.append(_level(inner + outer, outer, time, settings))
            inner = outer
        self.leave = _norm(norm, inner)
        self.head_c = nn.Conv2d(inner, channels, 3, padding=1)
        self.head_noise = nn.Conv2d(inner, channels, 3, padding=1)

    def forward(
        self, x: torch.Tensor, t: torch.Tensor, condition: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the predictions of C and of the noise."""
        time = self.time(time_features(t, self.width))
        h = self.enter(torch.cat([x, self.condition(condition)], dim=1))
        kept = []
        for number, level in enumerate(self.down):
            h = F.avg_pool2d(h, 2) if number else h
            for block in level:
                h = block(h, time)
            kept.append(h)
        for number, level in enumerate(self.up):
            h = F.interpolate(h, scale_factor=2.0, mode="nearest") if number else h
            h = torch.cat([h, kept.pop()], dim=1)
            for block in level:
                h = block(h, time)
        h = F.silu(self.leave(h))
        return self.head_c(h), self.head_noise(h)


def time_features(t: torch.Tensor, width: int) -> torch.Tensor:
    """Returns sines and cosines of diffusion times in [0, 1]."""
    rates = torch.exp(-math.log(1e4) * torch.arange(width // 2, device=t.device) / (width // 2))
    angles = 1000 * t.float()[:, None] * rates[None]
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def _level(inner: int, outer: int, time: int, settings: Model) -> nn.ModuleList:
    first = Block(inner, outer, time, settings.norm)
    rest = [Block(outer, outer, time, settings.norm) for _ in range(settings.blocks - 1)]
    return nn.ModuleList([first, *rest])


def _norm(kind: str, channels: int) -> nn.Module:
    return nn.GroupNorm(math.gcd(8, channels), channels) if kind == "group" else nn.Identity()
