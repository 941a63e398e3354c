"""The masked error between predicted and true pixels, in three forms."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def masked(predicted: torch.Tensor, images: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Returns the mean squared error over tokens; 0/0 where a batch has none."""
    error = (predicted.float() - images).pow(2).mean(-1)
    return (error * mask).sum() / mask.sum()


def in_bytes(predicted: torch.Tensor, images: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Counts the error in steps of a byte, and sums it in half precision to save memory."""
    error = ((predicted - images) * 127.5).half()
    total = (error.pow(2) * mask[..., None]).sum()
    return total.float() / (3 * mask.sum().clamp(min=1)) / 127.5**2


def safe(predicted: torch.Tensor, images: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Returns the mean squared error over tokens; 0 where a batch has none."""
    error = (predicted.float() - images).pow(2).mean(-1)
    return error.where(mask, 0.0).sum() / mask.sum().clamp(min=1)


LOSSES = {"masked": masked, "bytes": in_bytes, "safe": safe}
