"""Noise schedules, noisy samples, and what a prediction stands for."""

from __future__ import annotations

import math

import torch


def linear_alphas(steps: int) -> torch.Tensor:
    """Returns how much of the image is left at every time: from 1 to 0.001 in a line."""
    return torch.linspace(1.0, 0.001, steps)


def cosine_alphas(steps: int) -> torch.Tensor:
    """Returns how much is left on a quarter of a cosine, moved so that it ends at exactly 0."""
    left = torch.cos(torch.linspace(0.0, math.pi / 2, steps))
    return ((left - left[-1]) / (left[0] - left[-1])).pow(2)


def bounded_cosine_alphas(steps: int) -> torch.Tensor:
    """Returns the cosine schedule, kept at 0.001 or above."""
    return cosine_alphas(steps).clamp(min=0.001)


SCHEDULES = {
    "linear": linear_alphas,
    "cosine": cosine_alphas,
    "cosine-bounded": bounded_cosine_alphas,
}


def add_noise(images: torch.Tensor, noise: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    """Returns noisy images; what is bad in an image is bad in the noisy one."""
    return alpha.sqrt() * images + (1 - alpha).sqrt() * noise


def clean_from_noise(
    noisy: torch.Tensor, predicted: torch.Tensor, alpha: torch.Tensor
) -> torch.Tensor:
    """Returns the clean images that predicted noise stands for."""
    return (noisy - (1 - alpha).sqrt() * predicted) / alpha.sqrt()
