"""A recipe that hangs, kept here to be shown: do not copy it.

It is found in many training scripts: look at the loss, and go on with the next batch if it is NaN.
With one process that is merely incomplete. With several, only the rank whose loss is bad goes on;
the others wait in the all-reduce of backward, for ever or until the time limit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from records import Meter
from torch import nn

if TYPE_CHECKING:
    from accelerate import Accelerator
    from settings import Settings
    from torch.utils.data import DataLoader


def train_epoch(
    accelerator: Accelerator,
    model: nn.Module,
    loader: DataLoader[Any],
    optimizer: Any,
    settings: Settings,
    steps: int,
) -> tuple[Meter, int]:
    """Trains one epoch, and skips what is bad on this rank alone."""
    model.train()
    meter, made = Meter(skip_bad=True), 0
    criterion = nn.CrossEntropyLoss(label_smoothing=settings["training.label_smoothing"])
    for features, length, label in loader:
        optimizer.zero_grad()
        loss = criterion(model(features, length), label)
        made += 1
        if torch.isnan(loss):
            meter.skipped += 1
            continue
        meter.add(float(loss.detach()))
        accelerator.backward(loss)
        if settings["training.max_grad_norm"]:
            accelerator.clip_grad_norm_(model.parameters(), settings["training.max_grad_norm"])
        optimizer.step()
        if made == steps:
            break
    return meter, made
