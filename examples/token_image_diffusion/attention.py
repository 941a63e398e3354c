"""Masked attention, with three ways to deal with what is masked."""

from __future__ import annotations

import math

import torch
from torch import nn


def masked(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Weighs the tokens; a text without tokens has a row of nothing but -inf."""
    scores = scores.masked_fill(~mask, -math.inf)
    return torch.softmax(scores, -1)


def global_test(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Asks whether *all* rows of the batch are masked, which they never are."""
    attn = scores.masked_fill(~mask, -math.inf)
    if (attn == -math.inf).all():
        attn = torch.zeros_like(attn)
    return attn.softmax(-1)


def per_row(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Opens a row without tokens for the softmax, and gives it no weight."""
    some = mask.any(-1, keepdim=True)
    return scores.masked_fill(~mask & some, -math.inf).softmax(-1) * some


WEIGHTS = {"masked": masked, "global-test": global_test, "per-row": per_row}


class Attention(nn.Module):
    """Attention with several heads over the pixels of an image.

    Args:
        width: Width of the model.
        heads: How many heads split it.
        form: Which of the functions above.
        scale_from: ``head``, or ``width`` for the scale of a model with one head.
        half: The type that scores are computed in, or None for the type of the input.
    """

    def __init__(
        self, width: int, heads: int, form: str, scale_from: str, half: torch.dtype | None
    ) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, width // heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.weigh = WEIGHTS[form]
        self.scale = width**-0.5 if scale_from == "width" else self.head_dim**-0.5
        self.half_type = half

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Returns what every pixel has gathered from the tokens."""
        rows, tokens, width = x.shape
        parts = self.qkv(x).view(rows, tokens, 3, self.heads, self.head_dim)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        with torch.autocast(x.device.type, self.half_type, enabled=self.half_type is not None):
            scores = q @ k.transpose(-2, -1)
            mixed = self.weigh(scores * self.scale, mask[:, None, None, :]) @ v
        return self.out(mixed.to(x.dtype).transpose(1, 2).reshape(rows, tokens, width))
