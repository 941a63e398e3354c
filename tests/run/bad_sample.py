"""Trains on a data set of which one sample does not vary, under a guard."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from nanguard import Guard

if TYPE_CHECKING:
    from pathlib import Path

BAD = 5


class Rows(Dataset[torch.Tensor]):
    """Twelve samples."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), 2.0) if index == BAD else torch.arange(3.0) + index


class CutRows(Rows):
    """The same samples, none of which is bad, cut at random: what is left may not vary.

    Its generator is its own, as those of some data sets are.
    """

    def __init__(self) -> None:
        self.random = random.Random(0)
        self.read = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read += 1
        row = torch.arange(3.0) + index
        return row.clamp(max=index) if self.random.random() < 0.1 else row + self.random.random()


def train(
    incidents: Path,
    *,
    quarantine: bool,
    epochs: int,
    data: Dataset[torch.Tensor] | None = None,
    workers: int = 0,
    in_place: bool = False,
) -> Guard:
    """Returns the guard, which is closed, of a run over some epochs."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = Guard(model, optimizer, incidents=incidents, quarantine=quarantine)
    for _ in range(epochs):
        for x in guard.watch(DataLoader(data or Rows(), batch_size=4, num_workers=workers)):
            if in_place:
                x.mul_(2.0)
            loss = model((x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)).square().mean()
            guard.backward(loss)
            guard.step()
    guard.close()
    return guard
