"""A small model that breaks for known reasons, in a file that an incident can point at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# What a batch holds beside its inputs and targets, and what is healthy.
HEALTHY = {"weight": 0.5, "sign": 1.0, "gain": 1.0, "factor": 1.0}
SIZE = 8


class Tiny(nn.Module):
    """Linear, BatchNorm, Dropout, Linear; returns its own loss, as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.norm = nn.BatchNorm1d(12)
        self.drop = nn.Dropout(0.1)
        self.last = nn.Linear(12, 1)

    def forward(
        self, x: Tensor, labels: Tensor, weight: Tensor, sign: Tensor, gain: Tensor, factor: Tensor
    ) -> dict[str, Tensor]:
        out = self.last(self.drop(torch.relu(self.norm(self.first(x))))).squeeze(-1).float()
        error = (out - labels).square() * factor
        entropy = torch.log(weight) * sign
        spread = torch.sqrt((out * gain).square())
        return {"loss": error.mean() + 0.01 * entropy.mean() + 0.01 * spread.mean()}


def line_of(code: str) -> int:
    """Returns the line of this file that holds some code."""
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if code in line)


# Where and why each fault breaks a step: symptom, line of the origin, operation, cause.
NAN_INPUT = ("loss", "nan", "input", None, "bad-input-data")
INF_LOSS = ("loss", "inf", "aten.log", "torch.log(weight)", "log-or-sqrt-domain")
GRADIENT = ("gradient", "nan", "aten.sqrt", "torch.sqrt(", "gradient-singularity")
SPIKE = ("loss", "spike", None, None, None)
FAULTS = {
    "nan-input": NAN_INPUT,
    "inf-loss": INF_LOSS,
    "minus-inf-loss": INF_LOSS,
    "gradient": GRADIENT,
    "spike": SPIKE,
}


def samples(batches: int, seed: int = 1) -> list[dict[str, Tensor]]:
    """Returns healthy samples for so many batches."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batches * SIZE, 6, generator=generator)
    y = x.sum(dim=1) + 0.1 * torch.randn(batches * SIZE, generator=generator)
    extra = {name: torch.tensor(value) for name, value in HEALTHY.items()}
    return [{"x": x[i], "labels": y[i], **extra} for i in range(batches * SIZE)]


def spoil(data: list[dict[str, Tensor]], faults: dict[int, str]) -> list[dict[str, Tensor]]:
    """Returns the samples with a fault in one sample, or in all, of some batches."""
    out = [dict(sample) for sample in data]
    for batch, fault in faults.items():
        one = out[batch * SIZE + 3]
        if fault == "nan-input":
            one["x"] = one["x"].clone()
            one["x"][2] = float("nan")
        elif fault == "gradient":
            one["gain"] = torch.tensor(0.0)
        elif fault == "spike":
            for sample in out[batch * SIZE : (batch + 1) * SIZE]:
                sample["factor"] = torch.tensor(1e4)
        else:
            one["weight"] = torch.tensor(0.0)
            one["sign"] = torch.tensor(-1.0 if fault == "inf-loss" else 1.0)
    return out


def without(data: list[dict[str, Tensor]], batches: Any) -> list[dict[str, Tensor]]:
    """Returns the samples of all other batches."""
    return [sample for index, sample in enumerate(data) if index // SIZE not in batches]
