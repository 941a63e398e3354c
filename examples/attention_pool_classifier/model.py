"""A sequence classifier: an encoder, attention pooling over time, and a linear head."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Mixes neighbouring moments and adds the result to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Conv1d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the sequence, mixed."""
        mixed = self.mix(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + nn.functional.gelu(mixed)


class AttentionPool(nn.Module):
    """Averages a sequence, with weights that a small network gives each moment.

    The weights are the exponentials of scores, divided by their sum. Nothing bounds the scores
    unless ``bound`` is given.
    """

    def __init__(self, width: int, bound: float | None, init: str) -> None:
        super().__init__()
        self.key = nn.Linear(width, width)
        self.score = nn.Linear(width, 1, bias=False)
        self.temperature = nn.Parameter(torch.ones(1))
        self.bound = bound
        if init == "empty":
            self.temperature = nn.Parameter(torch.empty(1))
        if init == "zero-temperature":
            self.temperature = nn.Parameter(torch.zeros(1))
        if init == "large":
            nn.init.normal_(self.score.weight, std=60.0)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Returns one vector for each sequence; the mask is 1 where the sequence is."""
        scores = self.score(torch.relu(self.key(x))).squeeze(-1)
        scores = scores / self.temperature
        if self.bound is not None:
            scores = self.bound * torch.tanh(scores / self.bound)
        weights = torch.exp(scores) * mask
        weights = weights / weights.sum(dim=1, keepdim=True)
        return torch.einsum("bt,btw->bw", weights, x)


class Classifier(nn.Module):
    """Tells the class of a sequence."""

    def __init__(
        self,
        features: int,
        width: int,
        layers: int,
        classes: int,
        *,
        norm: str = "layer",
        bound: float | None = None,
        init: str = "default",
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(features, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.pool = AttentionPool(width, bound, init)
        norms = {"layer": nn.LayerNorm, "batch": nn.BatchNorm1d, "none": nn.Identity}
        self.norm = norms[norm](width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        """Returns the logits of the classes."""
        mask = (torch.arange(x.shape[1], device=x.device) < length[:, None]).to(x.dtype)
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(self.pool(hidden, mask)))
