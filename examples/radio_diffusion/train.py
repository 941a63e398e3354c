"""Trains RadioDiff: radio maps from buildings and a transmitter.

python train.py --config config.yaml --out runs/night --set trainer.lr=1.0e-5
python train.py --config config.yaml --out runs/night --resume CHECKPOINT
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import milestones
import torch
from data import DataError
from diffusion import BadTensor
from milestones import CheckpointError
from records import Records, Step
from settings import SettingsError, read_settings
from system import Training, rate_at

if TYPE_CHECKING:
    from collections.abc import Iterator

    from data import Sample


def train(run: Training, records: Records) -> None:
    """Trains to the last step."""
    trainer = run.settings.trainer
    batches = run.batches()
    while run.step < trainer.train_num_steps:
        for group in run.optimizer.param_groups:
            group["lr"] = rate_at(run.step, trainer)
        made = accumulate(run, batches)
        run.scaler.unscale_(run.optimizer)
        limit = trainer.clip or math.inf  # infinite: the norm is only measured
        made.norm = torch.nn.utils.clip_grad_norm_(run.network.parameters(), limit)
        run.scaler.step(run.optimizer)
        run.scaler.update()
        run.optimizer.zero_grad()
        if run.step % trainer.log_every == 0:
            records.step(run, made)
        run.step += 1
        run.update_ema()
        if run.step % trainer.save_and_sample_every == 0:
            run.save()
            records.sample(run)


def accumulate(run: Training, batches: Iterator[Sample]) -> Step:
    """Adds up the gradients of the batches of one step."""
    trainer, made = run.settings.trainer, Step()
    for _ in range(trainer.gradient_accumulate_every):
        found = run.losses(next(batches))
        loss = found.total
        if trainer.nan_loss == "stop" and not torch.isfinite(loss):
            raise BadTensor(f"total_loss is {loss.item()}")
        if trainer.nan_loss == "zero" and not torch.isfinite(loss):
            loss = torch.zeros_like(loss, requires_grad=True)
            found.simple = loss
        run.scaler.scale(loss / trainer.gradient_accumulate_every).backward()
        made.add(found, loss)
    return made


def prepare(args: argparse.Namespace) -> Training:
    """Returns a run that is ready to train."""
    changes = [*args.set, f"trainer.train_num_steps={args.steps}"] if args.steps else args.set
    settings = read_settings(args.config, changes)
    args.out.mkdir(parents=True, exist_ok=True)
    run = Training(settings, args.out)
    path, trainer = args.resume, settings.trainer
    if path is None and trainer.resume_milestone:
        step = trainer.resume_milestone * trainer.save_and_sample_every
        path = milestones.milestone(args.out, step)
    if path is not None:
        run.resume(path)
    return run


def arguments() -> argparse.Namespace:
    """Returns what the command line says."""
    parser = argparse.ArgumentParser(description="Trains RadioDiff.")
    parser.add_argument("--config", type=Path, default=Path("config.yaml"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, default=Path("runs/radio"))
    parser.add_argument("--resume", type=Path, metavar="CHECKPOINT")
    parser.add_argument("--steps", type=int)
    return parser.parse_args()


def main() -> int:
    """Trains; returns 0, 1 if the training stopped itself, or 2 if it could not begin."""
    args = arguments()
    try:
        run = prepare(args)
    except (SettingsError, DataError, CheckpointError, OSError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    with Records(args.out) as records:
        records.begin(run)
        try:
            train(run, records)
        except BadTensor as error:
            records.line(f"step {run.step}: {error}; stopped")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
