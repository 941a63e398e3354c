"""A model that divides by the sum of a sample, and data in which one sample is zero."""

import hashlib

import torch
from torch import nn
from torch.nn import functional as F

STEPS, BAD = 12, 7


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(STEPS * 4, 6, generator=generator) + 0.1
    x[BAD * 4 + 2] = 0
    return x, torch.rand(STEPS * 4, 1, generator=generator)


def batches():
    x, y = data()
    for step in range(STEPS):
        rows = slice(4 * step, 4 * step + 4)
        yield x[rows].clone(), y[rows].clone()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.drop, self.last = nn.Dropout(0.1), nn.Linear(8, 1)

    def forward(self, x):
        share = x / x.sum(1, keepdim=True)  # FAULT
        return self.last(self.drop(self.norm(self.first(share))))


def digest(*modules):
    """Returns what tells two trained models, and all random streams, apart."""
    found = hashlib.sha256()
    for module in modules:
        for tensor in module.state_dict().values():
            found.update(tensor.numpy().tobytes())
    found.update(torch.get_rng_state().numpy().tobytes())
    return found.hexdigest()[:16]


def show(step, loss):
    print(step, float(loss.detach()).hex(), flush=True)


__all__ = ["BAD", "F", "Net", "batches", "digest", "nn", "show", "torch"]
