"""The same training with nanguard in it: safe parts in the model, and a guard around the step.

    python guarded.py --config config.yaml [--set training.lr=1e-4 ...] [--out runs/guarded]

It takes the configuration that breaks ``train.py`` and gets through.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

import torch
from attention import Attention
from codec import TokenError
from data import loader_of
from diffusion import clean_from_noise
from model import Block, TokenImageDiT
from settings import SettingsError, read_settings
from torch.optim.lr_scheduler import LambdaLR
from train import Run, arguments, average_of, finish, optimizer_of, prepare, save_checkpoint, tell

from nanguard import Guard, NonFiniteError, ops
from nanguard.errors import UsageError

if TYPE_CHECKING:
    from settings import Settings

MAX_SCORE, MAX_SCALE, MAX_NORM = 50.0, 1.0, 1.0


class SafeAttention(Attention):
    """Attention whose scores are bounded, and in which a text without tokens gathers nothing."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Returns what every pixel has gathered from the tokens."""
        rows, tokens, width = x.shape
        parts = self.qkv(x).view(rows, tokens, 3, self.heads, self.head_dim)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        with torch.autocast(x.device.type, self.half_type, enabled=self.half_type is not None):
            mixed = ops.attention(
                q, k, v, mask[:, None, None, :], head_dim=self.head_dim, max_score=MAX_SCORE
            )
        return self.out(mixed.to(x.dtype).transpose(1, 2).reshape(rows, tokens, width))


class SafeBlock(Block):
    """A block with a norm that knows rows of zeros, and AdaLN scales that are bounded."""

    def __init__(self, settings: Settings, half: torch.dtype | None) -> None:
        super().__init__(settings, half)
        width = settings["model.width"]
        self.norm1, self.norm2 = ops.RMSNorm(width), ops.RMSNorm(width)
        self.attention = SafeAttention(width, settings["model.heads"], "masked", "head", half)

    def forward(self, x: torch.Tensor, time: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Returns the pixels after the block."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(time)
        normed = ops.modulate(self.norm1(x), shift1, scale1, max_scale=MAX_SCALE)
        x = x + gate1 * self.attention(normed, mask)
        normed = ops.modulate(self.norm2(x), shift2, scale2, max_scale=MAX_SCALE)
        return x + gate2 * self.mlp(normed)


class SafeDiT(TokenImageDiT):
    """The model, built of safe blocks."""

    def __init__(self, settings: Settings, half: torch.dtype | None) -> None:
        super().__init__(settings, half)
        depth = settings["model.depth"]
        self.blocks = torch.nn.ModuleList(SafeBlock(settings, half) for _ in range(depth))
        self.norm = ops.RMSNorm(settings["model.width"])


class SafeRun(Run):
    """A run whose schedule stays above 0, and whose loss knows texts without tokens."""

    empty = ops.Counter()

    def loss(self, batch: Any, draw: torch.Generator) -> torch.Tensor:
        """Returns the loss of one batch at random times."""
        images, mask = (part.to(self.device, non_blocking=True) for part in batch)
        index = torch.randint(len(self.alphas), (len(images),), generator=draw).to(self.device)
        noise = torch.randn(images.shape, generator=draw).to(self.device)
        noisy = ops.add_noise(images, noise, index, self.alphas)
        with torch.autocast(self.device.type, self.half, enabled=self.half is not None):
            predicted = self.model(noisy, index / (len(self.alphas) - 1), mask)
        if self.settings["diffusion.prediction"] == "eps":
            predicted = clean_from_noise(noisy, predicted, self.alphas[index][:, None, None])
        return ops.masked_mse(predicted, images, mask[..., None], empties=self.empty)


def main() -> None:
    """Trains as the command line says."""
    args = arguments(__doc__)
    try:
        run = safe_run(args)
    except (SettingsError, TokenError, UsageError) as error:
        sys.stderr.write(f"guarded.py: {error}\n")
        raise SystemExit(2) from None
    try:
        train(run, resume=args.resume is not None)
    except SettingsError as error:
        sys.stderr.write(f"guarded.py: {error}\n")
        raise SystemExit(2) from None
    except NonFiniteError as error:
        sys.stderr.write(f"guarded.py: stopped: {error}\n")
        raise SystemExit(3) from None


def safe_run(args: Any) -> SafeRun:
    """Makes the run of ``train.py``, with safe parts in place of its own."""
    settings = read_settings(args.config, args.set, args.steps)
    run = prepare(settings, args.out, None)
    codec = ops.TokenCodec(settings["codec.vocab_size"])
    images = codec.encode(run.texts.ids).float() / 127.5 - 1
    schedules = {"linear": ops.linear_schedule}
    schedule = schedules.get(settings["diffusion.schedule"], ops.cosine_schedule)
    torch.manual_seed(settings["seed"])
    model = SafeDiT(settings, run.model.blocks[0].attention.half_type).to(run.device)
    parts = {field.name: getattr(run, field.name) for field in dataclasses.fields(run)}
    parts |= {
        "texts": dataclasses.replace(run.texts, images=images),
        "model": model,
        "optimizer": optimizer_of(model, settings, run.device),
        "average": average_of(model, settings),
        "alphas": schedule(settings["diffusion.timesteps"], device=run.device),
    }
    return SafeRun(**parts)


def train(run: SafeRun, *, resume: bool) -> None:
    """Trains to the end; a bad step changes nothing, and is on record.

    Args:
        run: The run.
        resume: Go on from the last good snapshot that the guard has kept in the run's folder.
    """
    settings, total = run.settings, run.settings["training.steps"]
    accumulation = settings["training.gradient_accumulation_steps"]
    warmup = max(settings["training.warmup_steps"], 1)
    for group in run.optimizer.param_groups:
        group["lr"] = group["initial_lr"] = settings["training.lr"] * group["factor"]
    scheduler = LambdaLR(run.optimizer, lambda step: min(1.0, (step + 1) / warmup))
    draw = torch.Generator().manual_seed(settings["seed"])
    loader = loader_of(run.texts, settings, torch.Generator().manual_seed(settings["seed"]))
    guard = Guard(
        run.model,
        run.optimizer,
        scheduler=scheduler,
        scaler=run.scaler,
        ema=run.average,
        run_dir=run.out / "guard",
        generators=[draw],
    )
    if resume and not guard.resume():
        raise SettingsError(f"--resume: the guard has no snapshot in {run.out / 'guard'}")
    first = last = float("nan")
    with guard, (run.out / "train.log").open("w", encoding="utf-8") as log:
        while guard.steps < total:
            for index, batch in guard.enumerate(loader):
                loss = run.loss(batch, draw)
                guard.backward(loss / accumulation)
                if (index + 1) % accumulation:
                    continue
                guard.step(max_norm=MAX_NORM)
                run.step = guard.steps
                if (run.step - 1) % settings["logging.every_n_steps"] == 0 or run.step == total:
                    last = float(loss.detach())
                    first = last if first != first else first
                    rate = run.optimizer.param_groups[0]["lr"]
                    done = 100 * run.step / total
                    where = f"[{done:5.1f}%] step {run.step - 1}/{total}"
                    tell(log, f"{where} | loss {last:.4f} | lr {rate:.2e}")
                if run.step >= total:
                    break
        save_checkpoint(run)
        finish(run, log, first, last)
        tell(log, f"batches without a token, met in the loss: {run.empty.value()}")


if __name__ == "__main__":
    main()
