"""The same training with ``nanguard``: no bad step is made, on any rank, and none can hang another.

    accelerate launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no \
        --dynamo_backend no guarded.py --config config.yaml --out runs/guarded

What differs from ``train.py``: attention weights come from ``masked_softmax`` with bounded scores,
the loss looks at its labels, and a ``Guard`` makes the steps. Clipping stays as configured.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from data import loaders, scan
from model import AttentionPool
from records import Meter, Records
from settings import Settings, arguments, read
from torch import Tensor
from train import autocast, make_accelerator, make_model, make_optimizer, validate

from nanguard.integrations.accelerate import guard_for
from nanguard.ops import checked_cross_entropy, masked_softmax, warmup_cosine

if TYPE_CHECKING:
    from accelerate import Accelerator

BOUND = 10.0


class SafePool(AttentionPool):
    """Attention pooling that cannot overflow, nor divide by a sum of 0."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Returns one vector for each sequence."""
        scores = self.score(torch.relu(self.key(x))).squeeze(-1) / self.temperature
        weights = masked_softmax(scores, mask.bool(), max_score=self.bound or BOUND)
        return torch.einsum("bt,btw->bw", weights, x)


def train_epoch(
    accelerator: Accelerator, guard: Any, model: Any, loader: Any, settings: Settings
) -> Meter:
    """Trains one epoch; what is bad is skipped by all ranks together, and counted."""
    model.train()
    meter, skipped = Meter(skip_bad=False), guard.summary().skipped
    for features, length, label in guard.watch(loader):
        with accelerator.accumulate(model):
            with autocast(accelerator, settings):
                logits = model(features, length)
            loss = checked_cross_entropy(
                logits, label, label_smoothing=settings["training.label_smoothing"]
            )
            guard.backward(loss)
            meter.add(float(loss.detach()))
            guard.step(max_norm=settings["training.max_grad_norm"] or None)
    meter.skipped = guard.summary().skipped - skipped
    return meter


def main() -> None:
    """Trains to the end."""
    args = arguments(str(__doc__))
    settings = read(args)
    accelerator = make_accelerator(settings)
    torch.manual_seed(settings["seed"])
    with accelerator.main_process_first():
        train_loader, val_loader = loaders(settings, args.out)
    scan(train_loader, settings["data.num_classes"])
    model = make_model(settings)
    model.pool = SafePool(settings["model.width"], settings["model.score_bound"], "default")
    optimizer = make_optimizer(model, settings)
    model, optimizer, train_loader, val_loader = accelerator.prepare(
        model, optimizer, train_loader, val_loader
    )
    epochs, warmup = settings["training.epochs"], settings["training.warmup_epochs"] or 0
    if args.steps:
        epochs = min(epochs, math.ceil(args.steps / len(train_loader)))
    schedule = warmup_cosine(
        optimizer.optimizer, warmup_steps=min(warmup, epochs - 1), total_steps=epochs
    )
    records = Records(accelerator, settings, args.out)
    with guard_for(
        accelerator,
        model,
        optimizer,
        scheduler=schedule,
        scheduler_every="epoch",
        run_dir=args.out / "guard",
    ) as guard:
        for epoch in range(epochs):
            meter = train_epoch(accelerator, guard, model, train_loader, settings)
            val_loss, val_acc = validate(accelerator, model, val_loader, settings)
            records.epoch(epoch + 1, epochs, meter, val_loss, val_acc)
            guard.end_epoch(val_loss=val_loss, val_acc=val_acc)
        if accelerator.is_main_process:
            print(guard.summary())
    records.close()
    # DDP holds the ranks' connection; it has to let go for the connection to be closed.
    model, optimizer = accelerator.free_memory(model, optimizer)
    accelerator.end_training()


if __name__ == "__main__":
    main()
