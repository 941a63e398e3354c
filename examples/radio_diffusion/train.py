"""Trains RadioDiff: radio maps from buildings and a transmitter.

    python train.py --config config.yaml --out runs/night --set trainer.lr=1.0e-5
    python train.py --config config.yaml --out runs/night --resume runs/night/checkpoints/milestone-000020.pt
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import csv
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch
from torch.utils.data import DataLoader

import checkpoints
import diffusion
import vae as vaes
from checkpoints import CheckpointError
from data import FLOOR_DB, DataError, Sample, held_out, load_maps
from model import Denoiser
from settings import Settings, SettingsError, read_settings

if TYPE_CHECKING:
    from collections.abc import Iterator

_WATCHED = ("t_min", "weight_max", "latent_max", "prediction_max")


class Training:
    """One run: what is trained, on what, and how far it is."""

    def __init__(self, settings: Settings, out: Path) -> None:
        self.settings, self.out, self.step = settings, out, 0
        self.device = _device(settings.device)
        torch.manual_seed(settings.seed)
        self.maps = load_maps(settings.data, settings.seed, out / "data")
        self.held_out = Sample(*(part.to(self.device) for part in held_out(settings.data)))
        self.vae = vaes.load_or_fit(self.maps.radio, settings.vae.embed_dim, out / "vae.pt")
        self.vae.to(self.device)
        first = torch.stack([self.maps[i].radio for i in range(settings.data.batch_size)])
        self.vae.set_scale(settings.vae.scale_factor, first.to(self.device))
        torch.manual_seed(settings.seed)
        self.network = Denoiser(settings.model, settings.vae.embed_dim).to(self.device)
        self.ema = copy.deepcopy(self.network).requires_grad_(requires_grad=False)
        self.optimizer = torch.optim.AdamW(
            self.network.parameters(),
            lr=settings.trainer.lr,
            weight_decay=1e-4,
            fused=self.device.type == "cuda",
        )
        # The launcher decides about loss scaling, the trainer about autocast.
        scaled = settings.mixed_precision == "fp16" and self.device.type == "cuda"
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=scaled)

    @property
    def parts(self) -> dict[str, Any]:
        """What a checkpoint holds, beside the step."""
        return {"model": self.network, "optimizer": self.optimizer, "ema": self.ema}

    def resume(self, path: Path) -> None:
        """Goes on from a checkpoint, at the learning rate of the settings."""
        self.step = checkpoints.load(path, self.parts)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.trainer.lr

    def save(self) -> None:
        """Writes the milestone of this step."""
        state = {name: part.state_dict() for name, part in self.parts.items()}
        checkpoints.save(checkpoints.milestone(self.out, self.step), {**state, "step": self.step})

    def batches(self) -> Iterator[Sample]:
        """Yields batches for ever, in an order that the seed and the step decide."""
        order = torch.Generator().manual_seed(self.settings.seed + self.step)
        loader = DataLoader(
            self.maps, self.settings.data.batch_size, shuffle=True, generator=order, drop_last=True
        )
        while True:
            yield from loader

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the precision that the trainer's settings ask for."""
        if not self.settings.trainer.amp:
            return contextlib.nullcontext()
        half = torch.float16 if self.settings.trainer.fp16 else torch.bfloat16
        return torch.autocast(self.device.type, dtype=half)

    def losses(self, batch: Sample) -> diffusion.Losses:
        """Returns the loss of a batch of maps."""
        radio, condition, street = (part.to(self.device) for part in batch)
        trainer = self.settings.trainer
        if trainer.check_inputs:
            diffusion.check_finite(radio=radio, condition=condition, street=street)
        with self.autocast():
            with torch.no_grad():
                latents = self.vae.encode(radio)
            return diffusion.losses(
                self.network,
                latents,
                condition,
                diffusion.shrink(street, latents.shape[-1]),
                self.settings.model,
                check=trainer.check_inputs,
            )

    def update_ema(self) -> None:
        """Moves the average towards the weights."""
        trainer = self.settings.trainer
        if self.step % trainer.ema_update_every:
            return
        decay = trainer.ema_decay if self.step > trainer.ema_update_after_step else 0.0
        with torch.no_grad():
            for mean, now in zip(self.ema.parameters(), self.network.parameters()):
                mean.lerp_(now, 1 - decay)


def rate_at(step: int, settings: Settings) -> float:
    """Returns the learning rate of a step: a warm-up, then half a cosine down to the smallest."""
    trainer = settings.trainer
    if step < trainer.warmup_steps:
        return trainer.lr * (step + 1) / trainer.warmup_steps
    rest = max(1, trainer.train_num_steps - trainer.warmup_steps)
    done = min(1.0, (step - trainer.warmup_steps) / rest)
    return trainer.min_lr + (trainer.lr - trainer.min_lr) * (1 + math.cos(math.pi * done)) / 2


def train(run: Training, log: TextIO, monitor: Any) -> None:
    """Trains to the last step."""
    settings, trainer = run.settings, run.settings.trainer
    torch.manual_seed(settings.seed + run.step)
    batches = run.batches()
    while run.step < trainer.train_num_steps:
        for group in run.optimizer.param_groups:
            group["lr"] = rate_at(run.step, settings)
        shown, watched = [], []
        for _ in range(trainer.gradient_accumulate_every):
            found = run.losses(next(batches))
            loss = found.total / trainer.gradient_accumulate_every
            if trainer.nan_loss == "stop" and not torch.isfinite(loss):
                raise diffusion.BadTensor(f"total_loss is {loss.item()}")
            if trainer.nan_loss == "zero" and not torch.isfinite(loss):
                loss = torch.zeros_like(loss, requires_grad=True)
            run.scaler.scale(loss).backward()
            total = loss.detach() * trainer.gradient_accumulate_every
            shown.append(torch.stack([found.simple.detach(), found.vlb.detach(), total]))
            watched.append(found.watched)
        run.scaler.unscale_(run.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(run.network.parameters(), trainer.clip or math.inf)
        run.scaler.step(run.optimizer)
        run.scaler.update()
        run.optimizer.zero_grad()
        if run.step % trainer.log_every == 0:
            _report(run, torch.stack(shown).mean(0), log)
            _monitor(run, norm, watched, monitor)
        run.step += 1
        run.update_ema()
        if run.step % trainer.save_and_sample_every == 0:
            run.save()
            evaluate(run, log)


def evaluate(run: Training, log: TextIO) -> float:
    """Draws maps of cities that were not trained on; returns their error in decibels."""
    held, steps = run.held_out, run.settings.model.sampling_timesteps
    side = held.radio.shape[-1] // vaes.PATCH
    shape = (len(held.radio), run.settings.vae.embed_dim, side, side)
    with run.autocast():
        latents = diffusion.draw_maps(run.ema, held.condition, shape, steps, run.settings.seed)
    drawn = run.vae.decode(latents.float())
    error = ((drawn - held.radio) * held.street).square().sum() / held.street.sum()
    decibels = float(error.sqrt()) * -FLOOR_DB / 2
    _line(log, f"[Sample] {run.step}/{run.settings.trainer.train_num_steps}: rmse_db: {decibels:.2f}")
    return decibels


def _report(run: Training, losses: torch.Tensor, log: TextIO) -> None:
    simple, vlb, total = losses.tolist()
    rate = run.optimizer.param_groups[0]["lr"]
    _line(
        log,
        f"[Train Step] {run.step}/{run.settings.trainer.train_num_steps}: "
        f"loss_simple: {simple:.5f}, loss_vlb: {vlb:.5f}, total_loss: {total:.5f}, lr: {rate:.6f}",
    )


def _monitor(run: Training, norm: torch.Tensor, watched: list[Any], monitor: Any) -> None:
    row = [run.step, float(norm), run.optimizer.param_groups[0]["lr"]]
    for name in _WATCHED:
        values = [float(one[name]) for one in watched]
        row.append(min(values) if name == "t_min" else max(values))
    monitor.writerow([f"{value:.6g}" for value in row])


def _line(log: TextIO, text: str) -> None:
    print(text, flush=True)
    log.write(text + "\n")
    log.flush()


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def prepare(args: argparse.Namespace) -> Training:
    """Returns a run that is ready to train."""
    changes = [*args.set, f"trainer.train_num_steps={args.steps}"] if args.steps else args.set
    settings = read_settings(args.config, changes)
    args.out.mkdir(parents=True, exist_ok=True)
    run = Training(settings, args.out)
    path = args.resume
    if path is None and settings.trainer.resume_milestone:
        step = settings.trainer.resume_milestone * settings.trainer.save_and_sample_every
        path = checkpoints.milestone(args.out, step)
    if path is not None:
        run.resume(path)
    return run


def arguments() -> argparse.Namespace:
    """Returns what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, default=Path("runs/radio"))
    parser.add_argument("--resume", type=Path, metavar="CHECKPOINT")
    parser.add_argument("--steps", type=int)
    return parser.parse_args()


def main() -> int:
    """Trains; returns the exit code."""
    args = arguments()
    try:
        run = prepare(args)
    except (SettingsError, DataError, CheckpointError, OSError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    trainer = run.settings.trainer
    names = ("step", "grad_norm", "lr", *_WATCHED)
    with (
        (args.out / "train.log").open("a", encoding="utf-8") as log,
        (args.out / "monitor.csv").open("a", newline="", encoding="utf-8") as file,
    ):
        monitor = csv.writer(file)
        if file.tell() == 0:
            monitor.writerow(names)
        _line(
            log,
            f"amp: {trainer.amp} | fp16: {trainer.fp16} | "
            f"mixed_precision: {run.settings.mixed_precision}",
        )
        try:
            train(run, log, monitor)
        except diffusion.BadTensor as error:
            _line(log, f"step {run.step}: {error}; stopped")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
