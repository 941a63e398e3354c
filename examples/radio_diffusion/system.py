"""One run: what is trained, on what, in which precision, and how far it is."""

from __future__ import annotations

import contextlib
import copy
import math
from typing import TYPE_CHECKING, Any

import diffusion
import milestones
import torch
import vae as vaes
from data import FLOOR_DB, Sample, held_out, load_maps
from model import Denoiser
from torch.utils.data import DataLoader

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from settings import Settings, Trainer


class Training:
    """The state of a run.

    Attributes:
        step: Steps made so far.
        network: What is trained.
        ema: Its moving average, from which maps are drawn.
    """

    def __init__(self, settings: Settings, out: Path) -> None:
        self.settings, self.out, self.step = settings, out, 0
        self.device = _device(settings.device)
        self.maps = load_maps(settings.data, settings.seed, out / "data")
        self.held_out = Sample(*(part.to(self.device) for part in held_out(settings.data)))
        self.vae = self._fit_vae()
        torch.manual_seed(settings.seed)
        self.network = Denoiser(settings.model, settings.vae.embed_dim).to(self.device)
        self.ema = copy.deepcopy(self.network).requires_grad_(requires_grad=False)
        self.optimizer = torch.optim.AdamW(
            self.network.parameters(),
            lr=settings.trainer.lr,
            weight_decay=1e-4,
            fused=self.device.type == "cuda",
        )
        # The launcher's file decides about loss scaling, the trainer's about autocast.
        scaled = settings.mixed_precision == "fp16" and self.device.type == "cuda"
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=scaled)

    def _fit_vae(self) -> vaes.LinearVae:
        settings = self.settings
        path = self.out / "vae.pt"
        vae = vaes.load_or_fit(self.maps.radio, settings.vae.embed_dim, path).to(self.device)
        first = [self.maps[i].radio for i in range(settings.data.batch_size)]
        vae.set_scale(settings.vae.scale_factor, torch.stack(first).to(self.device))
        return vae

    @property
    def parts(self) -> dict[str, Any]:
        """What a checkpoint holds, beside the step."""
        return {"model": self.network, "optimizer": self.optimizer, "ema": self.ema}

    def resume(self, path: Path) -> None:
        """Goes on from a checkpoint; the learning rate is that of the settings."""
        self.step = milestones.load(path, self.parts)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.trainer.lr

    def save(self) -> None:
        """Writes the milestone of this step."""
        state = {name: part.state_dict() for name, part in self.parts.items()}
        milestones.save(milestones.milestone(self.out, self.step), {**state, "step": self.step})

    def loader(self) -> DataLoader[Sample]:
        """Returns the maps in batches, in an order that the seed and the step decide."""
        torch.manual_seed(self.settings.seed + self.step)
        order = torch.Generator().manual_seed(self.settings.seed + self.step)
        size = self.settings.data.batch_size
        return DataLoader(self.maps, size, shuffle=True, generator=order, drop_last=True)

    def batches(self) -> Iterator[Sample]:
        """Yields batches for ever."""
        loader = self.loader()
        while True:
            yield from loader

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the precision that the trainer's settings ask for."""
        if not self.settings.trainer.amp:
            return contextlib.nullcontext()
        half = torch.float16 if self.settings.trainer.fp16 else torch.bfloat16
        return torch.autocast(self.device.type, dtype=half)

    def losses(self, batch: Sample, weigh: diffusion.Weigh | None = None) -> diffusion.Losses:
        """Returns the loss of a batch of maps."""
        radio, condition, street = (part.to(self.device) for part in batch)
        trainer = self.settings.trainer
        if trainer.check_inputs:
            diffusion.check_finite(radio=radio, condition=condition, street=street)
        with self.autocast():
            with torch.no_grad():
                latents = self.vae.encode(radio)
            if trainer.amp and trainer.fp16:
                latents = latents.half()
            return diffusion.losses(
                self.network,
                latents,
                condition,
                diffusion.shrink(street, latents.shape[-1]),
                self.settings.model,
                weigh=weigh,
                check=trainer.check_inputs,
            )

    def update_ema(self) -> None:
        """Moves the average towards the weights."""
        trainer = self.settings.trainer
        if self.step % trainer.ema_update_every:
            return
        decay = trainer.ema_decay if self.step > trainer.ema_update_after_step else 0.0
        with torch.no_grad():
            for mean, now in zip(self.ema.parameters(), self.network.parameters(), strict=True):
                mean.lerp_(now, 1 - decay)

    def error_db(self) -> float:
        """Draws maps of cities that were not trained on; returns their error in decibels."""
        held, settings = self.held_out, self.settings
        side = held.radio.shape[-1] // vaes.PATCH
        shape = (len(held.radio), settings.vae.embed_dim, side, side)
        steps = settings.model.sampling_timesteps
        with self.autocast():
            latents = diffusion.draw_maps(self.ema, held.condition, shape, steps, settings.seed)
        drawn = self.vae.decode(latents.float())
        error = ((drawn - held.radio) * held.street).square().sum() / held.street.sum()
        return float(error.sqrt()) * -FLOOR_DB / 2


def rate_at(step: int, trainer: Trainer) -> float:
    """Returns the learning rate of a step: a warm-up, then half a cosine down to the smallest."""
    if step < trainer.warmup_steps:
        return trainer.lr * (step + 1) / trainer.warmup_steps
    rest = max(1, trainer.train_num_steps - trainer.warmup_steps)
    done = min(1.0, (step - trainer.warmup_steps) / rest)
    return trainer.min_lr + (trainer.lr - trainer.min_lr) * (1 + math.cos(math.pi * done)) / 2


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)
