"""Trains one classifier on six data sets.

python train.py --config config.yaml --out runs/first
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import harmful
import torch
from data import loaders
from model import Classifier, LabelMap, loss_of, masked
from records import Records, load_checkpoint
from settings import Settings, arguments, read, stop
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from torch.utils.data import DataLoader

# The rates of the staged plan; masking comes back with the last quarter of the run.
STAGES = (1.0e-6, 2.0e-6, 5.0e-6)
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def make_model(settings: Settings) -> Classifier:
    """Returns the model of a configuration."""
    needed = sum(about["num_classes"] for about in settings.datasets.values())
    labels = settings["model.num_labels"]
    if labels < needed:
        stop(f"model.num_labels is {labels}, but the data sets have {needed} classes; raise it")
    side, patch = settings["model.image_size"], settings["model.patch_size"]
    width, layers = settings["model.width"], settings["model.layers"]
    return Classifier(side, patch, width, layers, labels)


def make_optimizer(model: Classifier, settings: Settings) -> torch.optim.Optimizer:
    """Returns an optimizer with a rate for the backbone, and a higher one for the new head."""
    rate, scale = float(settings["training.lr"]), float(settings["training.head_lr_scale"])
    head = list(model.head.parameters())
    ours = {id(p) for p in head}
    groups = [
        {"params": [p for p in model.parameters() if id(p) not in ours], "lr": rate, "scale": 1.0},
        {"params": head, "lr": rate * scale, "scale": scale},
    ]
    if settings["training.optimizer"] == "sgd":
        return torch.optim.SGD(groups, lr=rate)
    fused = torch.cuda.is_available()
    return torch.optim.AdamW(groups, weight_decay=settings["training.weight_decay"], fused=fused)


def rate_at(step: int, settings: Settings) -> float:
    """Returns the rate of a step: a warm-up from a tenth, then the rate or the staged plan."""
    base, warmup = float(settings["training.lr"]), settings["training.warmup_steps"]
    if settings["training.plan"] == "staged":
        base = STAGES[min(step * 4 // settings["training.steps"], len(STAGES) - 1)]
    rise = 0.1 + 0.9 * step / warmup if step < warmup else 1.0
    return base * rise


def masks_at(step: int, settings: Settings) -> bool:
    """Returns whether logits are masked in a step."""
    if settings["training.plan"] == "staged":
        return step * 4 >= settings["training.steps"] * 3
    return bool(settings["datasets.enable_logits_masking"])


def forward(
    model: nn.Module, batch: Any, maps: LabelMap, settings: Settings, *, masking: bool
) -> tuple[Tensor, Tensor]:
    """Returns the logits of a batch, masked where that is on, and its targets."""
    picture, dataset, label = (part.to(maps.start.device) for part in batch)
    logits = model(picture)
    limit = settings["model.logit_clamp"]
    if limit:
        logits = logits.clamp(-limit, limit)
    if settings["data.on_bad_label"] == "clamp":
        label = harmful.into_range(label, maps.sizes[dataset])
    if masking:
        logits = masked(logits, maps.allowed[dataset], settings["datasets.mask_value"])
    return logits, maps.target(dataset, label)


def endless(loader: DataLoader[Any]) -> Iterator[Any]:
    """Goes over a loader again and again."""
    while True:
        yield from loader


@torch.no_grad()
def evaluate(
    model: nn.Module,
    sets: dict[str, DataLoader[Any]],
    maps: LabelMap,
    settings: Settings,
    *,
    masking: bool,
) -> dict[str, tuple[float, float]]:
    """Returns loss and accuracy for each data set."""
    model.eval()
    found = {}
    for name, loader in sets.items():
        losses, hits = [], []
        for batch in loader:
            logits, target = forward(model, batch, maps, settings, masking=masking)
            each = nn.functional.cross_entropy(logits.float(), target, reduction="none")
            losses.append(each)
            hits.append(logits.argmax(dim=1) == target)
        found[name] = (float(torch.cat(losses).mean()), float(torch.cat(hits).float().mean()))
    model.train()
    return found


def cast(settings: Settings, device: torch.device) -> AbstractContextManager[Any]:
    """Returns what the forward pass runs in."""
    half = HALF.get(settings.precision)
    return nullcontext() if half is None else torch.autocast(device.type, half)


class Trainer:
    """Makes the steps of a run."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self.settings = settings
        self.device = device
        self.model = make_model(settings).to(device)
        self.optimizer = make_optimizer(self.model, settings)
        self.scaler = torch.amp.GradScaler(device.type, enabled=settings.precision == "fp16")
        self.maps = LabelMap(settings, device)

    def set_rate(self, step: int) -> float:
        """Sets the rate of a step in every group."""
        rate = rate_at(step, self.settings)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["scale"]
        return rate

    def step(self, step: int, batch: Any) -> float:
        """Makes a step; returns its loss."""
        masking = masks_at(step, self.settings)
        with cast(self.settings, self.device):
            logits, target = forward(self.model, batch, self.maps, self.settings, masking=masking)
            loss = loss_of(logits, target, self.settings["loss.type"])
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        if self.settings.clip:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return float(loss.detach())


def choose_device(settings: Settings) -> torch.device:
    """Returns the device of a configuration."""
    wanted = settings["device"]
    if wanted == "cuda" and not torch.cuda.is_available():
        stop("device is cuda, but there is none; use device: auto")
    cuda = wanted != "cpu" and torch.cuda.is_available()
    return torch.device("cuda" if cuda else "cpu")


def main() -> None:
    """Trains to the end."""
    args = arguments(str(__doc__))
    settings = read(args)
    torch.manual_seed(settings["seed"])
    train, sets = loaders(settings, args.out)
    records = Records(settings, args.out)
    trainer = Trainer(settings, choose_device(settings))
    begin = load_checkpoint(args.resume, trainer.model, trainer.optimizer) if args.resume else 0
    steps = settings["training.steps"]
    for step, batch in zip(range(begin, steps), endless(train), strict=False):
        rate = trainer.set_rate(step)
        loss = trainer.step(step, batch)
        records.step(step, steps, loss, rate)
        if not loss <= settings["training.loss_alarm"]:
            records.alarm(step, loss)
        last = step + 1 in (steps, begin + args.steps)
        if (step + 1) % settings["training.eval_steps"] == 0 or last:
            masking = masks_at(step, settings)
            found = evaluate(trainer.model, sets, trainer.maps, settings, masking=masking)
            records.evaluation(step, found)
        if (step + 1) % settings["training.save_steps"] == 0 or last:
            records.save(step + 1, trainer.model, trainer.optimizer)
        if last:
            break
    records.close()


if __name__ == "__main__":
    main()
