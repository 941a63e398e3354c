"""A picture classifier with one head for all data sets, and the masks over its classes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from settings import Settings


class Mixer(nn.Module):
    """Mixes the patches of a picture, then the channels of each patch."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.over_patches = nn.Sequential(
            nn.Linear(patches, 2 * patches), nn.GELU(), nn.Linear(2 * patches, patches)
        )
        self.over_channels = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the patches, mixed."""
        x = x + self.over_patches(self.first(x).transpose(1, 2)).transpose(1, 2)
        return x + self.over_channels(self.second(x))


class Classifier(nn.Module):
    """Tells the class of a picture, among those of all data sets."""

    def __init__(self, side: int, patch: int, width: int, layers: int, classes: int) -> None:
        super().__init__()
        patches = (side // patch) ** 2
        self.embed = nn.Conv2d(3, width, patch, patch)
        self.blocks = nn.Sequential(*(Mixer(patches, width) for _ in range(layers)))
        self.norm = nn.LayerNorm(patches * width)
        self.head = nn.Linear(patches * width, classes)

    def forward(self, picture: Tensor) -> Tensor:
        """Returns the logits of all classes."""
        x = self.embed(picture).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x).flatten(1)))


class LabelMap:
    """Which classes of the head belong to which data set.

    Attributes:
        start: The first class of each data set, for labels.
        allowed: Which classes a sample of a data set may have; the last row is for no data set.
    """

    def __init__(self, settings: Settings, device: torch.device) -> None:
        sizes = {name: about["num_classes"] for name, about in settings.datasets.items()}
        listed = _starts(list(sizes), sizes)
        other = settings["data.label_map"] == "alphabetical"
        order = _starts(sorted(sizes), sizes) if other else listed
        self.start = torch.tensor([*(order[name] for name in sizes), 0], device=device)
        classes = torch.arange(settings["model.num_labels"], device=device)
        rows = [(listed[n] <= classes) & (classes < listed[n] + sizes[n]) for n in sizes]
        self.allowed = torch.stack([*rows, torch.zeros_like(rows[0])])
        self.sizes = torch.tensor([*sizes.values(), 0], device=device)

    def target(self, dataset: Tensor, label: Tensor) -> Tensor:
        """Returns the class of each sample among those of the head."""
        return self.start[dataset] + label


def _starts(names: list[str], sizes: dict[str, int]) -> dict[str, int]:
    found, at = {}, 0
    for name in names:
        found[name] = at
        at += sizes[name]
    return found


def masked(logits: Tensor, allowed: Tensor, value: float | None) -> Tensor:
    """Returns the logits with the classes of other data sets masked."""
    if value is None:
        return logits.masked_fill(~allowed, -math.inf)
    return logits.masked_fill(~allowed, value)


def loss_of(logits: Tensor, target: Tensor, kind: str) -> Tensor:
    """Returns the loss of a batch."""
    if kind == "label_smoothing":
        return nn.functional.cross_entropy(logits, target, label_smoothing=0.1)
    if kind == "focal":
        each = nn.functional.cross_entropy(logits, target, reduction="none")
        return ((1 - torch.exp(-each)) ** 2 * each).mean()
    return nn.functional.cross_entropy(logits, target)
