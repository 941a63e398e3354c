"""Trains the classifier with Accelerate, on one process or several.

    python train.py --config config.yaml --out runs/first
    accelerate launch --cpu --num_processes 2 --num_machines 1 --mixed_precision no \
        --dynamo_backend no train.py --config config.yaml --out runs/first
"""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import harmful
import torch
from accelerate import Accelerator, DataLoaderConfiguration, InitProcessGroupKwargs
from data import loaders, scan
from model import Classifier
from records import Meter, Records, load_checkpoint
from settings import Settings, arguments, read
from torch import Tensor, nn
from torch.optim import lr_scheduler

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch.optim import Optimizer
    from torch.utils.data import DataLoader


def make_accelerator(settings: Settings) -> Accelerator:
    """Returns the accelerator; a rank that waits too long for the others gives up."""
    precision = settings["training.mixed_precision"]
    cpu = settings["device"] == "cpu" or not torch.cuda.is_available()
    return Accelerator(
        cpu=cpu,
        # Accelerate has no fp16 on a CPU; there `autocast` does it, without a loss scale.
        mixed_precision="no" if cpu and precision == "fp16" else precision,
        gradient_accumulation_steps=settings["training.gradient_accumulation_steps"],
        dataloader_config=DataLoaderConfiguration(even_batches=settings["data.even_batches"]),
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=timedelta(seconds=settings["training.timeout_s"]))
        ],
    )


def autocast(accelerator: Accelerator, settings: Settings) -> AbstractContextManager[Any]:
    """Returns what the forward pass runs in."""
    if settings["training.mixed_precision"] == "fp16" and accelerator.device.type == "cpu":
        return torch.autocast("cpu", torch.float16)
    return nullcontext()


def make_model(settings: Settings) -> Classifier:
    """Returns the model of a configuration."""
    return Classifier(
        settings["data.features"],
        settings["model.width"],
        settings["model.layers"],
        settings["data.num_classes"],
        norm=settings["model.norm"],
        bound=settings["model.score_bound"],
        init=settings["model.init"],
    )


def make_optimizer(model: nn.Module, settings: Settings) -> Optimizer:
    """Returns AdamW, or plain SGD."""
    rate = float(settings["training.lr"])
    if settings["training.optimizer"] == "sgd":
        return torch.optim.SGD(model.parameters(), lr=rate)
    return torch.optim.AdamW(
        model.parameters(),
        lr=rate,
        weight_decay=settings["training.weight_decay"],
        eps=settings["training.adam_epsilon"],
        fused=torch.cuda.is_available(),
    )


def make_scheduler(optimizer: Optimizer, settings: Settings) -> Any:
    """Returns a warm-up from a tenth of the rate, then a cosine; stepped after every epoch."""
    epochs, warmup = settings["training.epochs"], settings["training.warmup_epochs"] or 0
    if settings["training.scheduler"] == "constant":
        return lr_scheduler.ConstantLR(optimizer, factor=1.0)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, max(1, epochs - warmup))
    if not warmup:
        return cosine
    rising = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=warmup)
    return lr_scheduler.SequentialLR(optimizer, [rising, cosine], milestones=[warmup])


def any_rank(accelerator: Accelerator, bad: Tensor) -> bool:
    """Returns whether something is true on any rank; all ranks get the same answer."""
    return bool(accelerator.reduce(bad.float(), reduction="sum") > 0)


def train_epoch(
    accelerator: Accelerator,
    model: nn.Module,
    loader: DataLoader[Any],
    optimizer: Any,
    settings: Settings,
    steps: int,
) -> tuple[Meter, int]:
    """Trains one epoch, or so many steps; returns the losses and how many steps were made."""
    model.train()
    meter, made = Meter(skip_bad=settings["training.logging_nan_inf_filter"]), 0
    criterion = nn.CrossEntropyLoss(label_smoothing=settings["training.label_smoothing"])
    limit, together = settings["training.max_grad_norm"], settings["training.on_nan"] != "go-on"
    for features, length, label in loader:
        with accelerator.accumulate(model):
            with autocast(accelerator, settings):
                logits = model(features, length)
                loss = criterion(logits, label)
            accelerator.backward(loss)
            bad = ~torch.isfinite(loss.detach())
            if accelerator.sync_gradients and limit:
                norm = accelerator.clip_grad_norm_(model.parameters(), limit)
                bad |= ~torch.isfinite(norm)
            # Every rank has called backward by now, so none of them waits if the step is left out.
            if together and any_rank(accelerator, bad):
                meter.skipped += 1
            else:
                meter.add(float(loss.detach()))
                optimizer.step()
            optimizer.zero_grad()
            made += int(accelerator.sync_gradients)
        if made == steps:
            break
    return meter, made


@torch.no_grad()
def validate(
    accelerator: Accelerator, model: nn.Module, loader: DataLoader[Any], settings: Settings
) -> tuple[float, float]:
    """Returns loss and accuracy over the validation data of all ranks.

    A sample counts as right if no class has a higher logit than its own. That is true of NaN, too:
    an accuracy of 1 beside a loss of NaN says nothing.
    """
    model.eval()
    losses, hits = [], []
    for features, length, label in loader:
        with autocast(accelerator, settings):
            logits = model(features, length)
        loss = nn.functional.cross_entropy(logits.float(), label, reduction="none")
        ahead = (logits > logits.gather(1, label[:, None])).sum(dim=1)
        gathered = accelerator.gather_for_metrics((loss, ahead == 0))
        losses.append(gathered[0])
        hits.append(gathered[1])
    return float(torch.cat(losses).mean()), float(torch.cat(hits).float().mean())


def main() -> None:
    """Trains to the end."""
    args = arguments(str(__doc__))
    settings = read(args)
    accelerator = make_accelerator(settings)
    torch.manual_seed(settings["seed"])
    with accelerator.main_process_first():
        train_loader, val_loader = loaders(settings, args.out)
    if settings["data.scan"]:
        scan(train_loader, settings["data.num_classes"])
    model = make_model(settings)
    optimizer = make_optimizer(model, settings)
    scheduler = make_scheduler(optimizer, settings)
    begin = load_checkpoint(args.resume, model, optimizer, scheduler) if args.resume else 0
    model, optimizer, train_loader, val_loader = accelerator.prepare(
        model, optimizer, train_loader, val_loader
    )
    epoch_of = harmful.train_epoch if settings["training.on_nan"] == "skip-alone" else train_epoch
    records = Records(accelerator, settings, args.out)
    epochs, left = settings["training.epochs"], args.steps
    for epoch in range(begin, epochs):
        meter, made = epoch_of(accelerator, model, train_loader, optimizer, settings, left)
        scheduler.step()
        val_loss, val_acc = validate(accelerator, model, val_loader, settings)
        records.epoch(epoch + 1, epochs, meter, val_loss, val_acc)
        if (epoch + 1) % settings["training.save_every_epochs"] == 0:
            bare = accelerator.unwrap_model(model)
            records.save(epoch + 1, val_loss, bare, optimizer, scheduler)
        left -= made
        if args.steps and left <= 0:
            break
    records.close()
    # DDP holds the ranks' connection; it has to let go for the connection to be closed.
    model, optimizer = accelerator.free_memory(model, optimizer)
    accelerator.end_training()


if __name__ == "__main__":
    main()
