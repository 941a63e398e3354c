"""The same training with ``nanguard``: labels are looked at, and no bad step is made.

    python guarded.py --config config.yaml --out runs/guarded

What differs from ``train.py``: the loss masks the classes of other data sets itself and never the
target's; a label that is not one of its data set is left out and counted, neither clamped nor inf;
and a ``Guard`` makes the steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from data import loaders
from records import Records
from settings import Settings, arguments, read
from torch import Tensor
from train import Trainer, cast, choose_device, endless

from nanguard import Guard
from nanguard import Settings as GuardSettings
from nanguard.ops import Counter, checked_cross_entropy, warmup_cosine

if TYPE_CHECKING:
    from model import LabelMap
    from torch import nn
    from torch.utils.data import DataLoader


class Labels:
    """The loss of a batch, and how many of its labels were none."""

    def __init__(self, maps: LabelMap, settings: Settings) -> None:
        self.maps = maps
        self.bad = Counter()
        self.smoothing = 0.1 if settings["loss.type"] == "label_smoothing" else 0.0

    def loss(self, model: nn.Module, batch: Any, reduction: Any = "mean") -> tuple[Tensor, Tensor]:
        """Returns the loss, and which samples are predicted right."""
        picture, dataset, label = (part.to(self.maps.start.device) for part in batch)
        logits, target = model(picture), self.maps.target(dataset, label)
        allowed = self.maps.allowed[dataset]
        loss = checked_cross_entropy(
            logits,
            target,
            allowed=allowed,
            label_smoothing=self.smoothing,
            reduction=reduction,
            on_bad="report",
            bad_labels=self.bad,
        )
        best = logits.masked_fill(~allowed, torch.finfo(logits.dtype).min).argmax(dim=1)
        return loss, best == target


@torch.no_grad()
def evaluate(
    model: nn.Module, sets: dict[str, DataLoader[Any]], labels: Labels
) -> dict[str, tuple[float, float]]:
    """Returns loss and accuracy for each data set."""
    model.eval()
    found = {}
    for name, loader in sets.items():
        before = labels.bad.value()
        parts = [labels.loss(model, batch, "none") for batch in loader]
        losses, hits = (torch.cat(column) for column in zip(*parts, strict=True))
        counted = len(losses) - (labels.bad.value() - before)
        found[name] = (float(losses.sum()) / max(1, counted), float(hits.float().mean()))
    model.train()
    return found


def main() -> None:
    """Trains to the end."""
    args = arguments(str(__doc__))
    settings = read(args)
    torch.manual_seed(settings["seed"])
    train, sets = loaders(settings, args.out)
    trainer = Trainer(settings, choose_device(settings))
    labels = Labels(trainer.maps, settings)
    steps, warmup = settings["training.steps"], settings["training.warmup_steps"]
    steps = min(steps, args.steps or steps)
    schedule = warmup_cosine(
        trainer.optimizer, warmup_steps=min(warmup, steps - 1), total_steps=steps, end_factor=0.1
    )
    records = Records(settings, args.out)
    with Guard(
        trainer.model,
        trainer.optimizer,
        scheduler=schedule,
        scaler=trainer.scaler if trainer.scaler.is_enabled() else None,
        run_dir=args.out / "guard",
        settings=GuardSettings(snapshot_every=settings["training.save_steps"]),
    ) as guard:
        for step, batch in guard.enumerate(endless(train)):
            with cast(settings, trainer.device):
                loss, _ = labels.loss(trainer.model, batch)
            guard.backward(loss)
            guard.step(max_norm=settings.clip or None)
            records.step(step, steps, float(loss.detach()), schedule.get_last_lr()[0])
            last = step + 1 == steps
            if (step + 1) % settings["training.eval_steps"] == 0 or last:
                records.evaluation(step, evaluate(trainer.model, sets, labels))
            if last:
                break
        print(guard.summary())
    print(f"labels that are not of their data set: {labels.bad.value()}, left out each time")
    records.close()


if __name__ == "__main__":
    main()
