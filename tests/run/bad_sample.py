"""Trains on a data set of which one sample does not vary, under a guard."""

from __future__ import annotations

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


def train(incidents: Path, *, quarantine: bool, epochs: int) -> Guard:
    """Returns the guard, which is closed, of a run over some epochs."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = Guard(model, optimizer, incidents=incidents, quarantine=quarantine)
    for _ in range(epochs):
        for x in guard.watch(DataLoader(Rows(), batch_size=4)):
            loss = model((x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)).square().mean()
            guard.backward(loss)
            guard.step()
    guard.close()
    return guard
