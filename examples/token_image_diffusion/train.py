"""Trains a diffusion transformer on texts that are written as images.

python train.py --config config.yaml [--set training.lr=1e-4 ...] [--out runs/tokens]
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from codec import TokenError
from data import batches, load_texts
from diffusion import SCHEDULES, add_noise, clean_from_noise
from evaluation import exact_match
from losses import LOSSES
from model import TokenImageDiT
from settings import SettingsError, read_settings
from stepping import make_step
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

if TYPE_CHECKING:
    from data import Texts
    from settings import Settings

TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class Run:
    """Everything that a step needs."""

    settings: Settings
    out: Path
    device: torch.device
    texts: Texts
    model: TokenImageDiT
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    average: AveragedModel | None
    alphas: torch.Tensor
    half: torch.dtype | None
    step: int = 0

    def loss(self, batch: Any, draw: torch.Generator) -> torch.Tensor:
        """Returns the loss of one batch at random times."""
        images, mask = (part.to(self.device, non_blocking=True) for part in batch)
        index = torch.randint(len(self.alphas), (len(images),), generator=draw).to(self.device)
        noise = torch.randn(images.shape, generator=draw).to(self.device)
        alpha = self.alphas[index][:, None, None]
        noisy = add_noise(images, noise, alpha)
        with torch.autocast(self.device.type, self.half, enabled=self.half is not None):
            predicted = self.model(noisy, index / (len(self.alphas) - 1), mask)
        if self.settings["diffusion.prediction"] == "eps":
            predicted = clean_from_noise(noisy, predicted, alpha)
        return LOSSES[self.settings["loss.form"]](predicted, images, mask)


def main() -> None:
    """Trains as the command line says."""
    args = arguments(__doc__)
    try:
        settings = read_settings(args.config, args.set, args.steps)
        run = prepare(settings, args.out, args.resume)
    except (SettingsError, TokenError) as error:
        sys.stderr.write(f"train.py: {error}\n")
        raise SystemExit(2) from None
    raise SystemExit(train(run))


def arguments(what: str | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=what, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=Path(__file__).parent / "config.yaml")
    parser.add_argument("--set", action="extend", nargs="+", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, default=Path("runs/token_image_diffusion"))
    parser.add_argument("--resume", type=Path, metavar="CHECKPOINT")
    parser.add_argument("--steps", type=int)
    return parser.parse_args()


def prepare(settings: Settings, out: Path, resume: Path | None) -> Run:
    """Makes data, model and optimizer, or takes them from a checkpoint."""
    device = device_of(settings["device"])
    out.mkdir(parents=True, exist_ok=True)
    texts = load_texts(settings, out)
    torch.manual_seed(settings["seed"])
    half = TYPES[settings["amp.dtype"]] if settings["amp.enabled"] else None
    scope = settings["amp.scope"]
    everywhere = scope == "model" or (scope == "auto" and device.type == "cuda")
    model = TokenImageDiT(settings, half).to(device)
    run = Run(
        settings,
        out,
        device,
        texts,
        model,
        optimizer_of(model, settings, device),
        torch.amp.GradScaler(device.type, enabled=half == torch.float16),
        average_of(model, settings),
        SCHEDULES[settings["diffusion.schedule"]](settings["diffusion.timesteps"]).to(device),
        half if everywhere else None,
    )
    if resume is not None:
        load_checkpoint(run, resume)
    kept = {**settings.as_tree(), "data_file": "data/tokens.jsonl"}
    (out / "config.yaml").write_text(yaml.safe_dump(kept, sort_keys=False), encoding="utf-8")
    return run


def device_of(name: str) -> torch.device:
    """Returns the device that a setting stands for."""
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise SettingsError("device is cuda, but there is no CUDA device; write device: auto")
    return torch.device("cuda" if there and name != "cpu" else "cpu")


def optimizer_of(model: torch.nn.Module, settings: Settings, device: torch.device) -> Any:
    """Returns the optimizer; the AdaLN layers may have a learning rate of their own."""
    adaln = [p for name, p in model.named_parameters() if "modulation" in name]
    others = [p for name, p in model.named_parameters() if "modulation" not in name]
    factor = settings["optimizer.adaln_lr_factor"]
    return torch.optim.AdamW(
        [{"params": others, "factor": 1.0}, {"params": adaln, "factor": factor}],
        lr=settings["training.lr"],
        betas=tuple(settings["optimizer.betas"]),
        eps=settings["optimizer.eps"],
        weight_decay=settings["optimizer.weight_decay"],
        fused=device.type == "cuda",
    )


def average_of(model: torch.nn.Module, settings: Settings) -> AveragedModel | None:
    """Returns the moving average of the weights, where one is wanted."""
    if not settings["ema.enabled"]:
        return None
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(settings["ema.decay"]))


def train(run: Run) -> int:
    """Trains to the end, or until the loss has been NaN for too long; returns the exit code."""
    settings, total = run.settings, run.settings["training.steps"]
    accumulation = settings["training.gradient_accumulation_steps"]
    stream = batches(run.texts, settings, run.step * accumulation)
    first, bad = None, 0
    size = sum(parameter.numel() for parameter in run.model.parameters())
    with (run.out / "train.log").open("a" if run.step else "w", encoding="utf-8") as log:
        tell(log, f"{size / 1e6:.1f}M parameters, {len(run.texts)} texts, {run.device}")
        for step in range(run.step, total):
            loss, norm, zeroed = one_step(run, stream, step)
            for name in zeroed:
                tell(log, f"WARNING: step {step}: NaN/Inf gradient in {name}, set to zero")
            first = loss if first is None else first
            bad = 0 if math.isfinite(loss) else bad + 1
            run.step = step + 1
            if step % settings["logging.every_n_steps"] == 0 or bad or step == total - 1:
                tell(log, line(run, step, loss, norm))
            if run.step % settings["checkpoint.every_n_steps"] == 0 or run.step == total:
                save_checkpoint(run)
            if bad == settings["training.stop_after_nan"]:
                tell(log, f"the loss was not finite for {bad} steps in a row: giving up")
                return 1
        finish(run, log, first, loss)
    return 0


def one_step(run: Run, stream: Any, step: int) -> tuple[float, float, list[str]]:
    """Makes one step from several batches; returns mean loss, gradient norm and bad names."""
    settings = run.settings
    accumulation = settings["training.gradient_accumulation_steps"]
    # One stream for each step: the same noise on a CPU, on a GPU, and after a resume.
    draw = torch.Generator().manual_seed(1_000_003 * settings["seed"] + step)
    for group in run.optimizer.param_groups:
        group["lr"] = group["factor"] * rate_at(settings, step)
    total = 0.0
    for index in range(accumulation):
        loss = run.loss(next(stream), draw)
        total += float(loss.detach()) / accumulation
        if settings["training.accumulation_divisor"] == "index":
            loss = loss / index  # meant to be the batches so far, but begins at 0
        else:
            loss = loss / accumulation
        run.scaler.scale(loss).backward()
    norm, zeroed = make_step(run.model, run.optimizer, run.scaler, settings)
    if run.average is not None:
        run.average.update_parameters(run.model)
    return total, norm, zeroed


def rate_at(settings: Settings, step: int) -> float:
    """Returns the learning rate: a line up, then a constant."""
    warmup = settings["training.warmup_steps"]
    return settings["training.lr"] * min(1.0, (step + 1) / max(warmup, 1))


def line(run: Run, step: int, loss: float, norm: float) -> str:
    """Returns the line of the log for one step."""
    total = run.settings["training.steps"]
    text = (
        f"[{100 * (step + 1) / total:5.1f}%] step {step}/{total} | loss {loss:.4f} | "
        f"lr {rate_at(run.settings, step):.2e} | grad_norm {norm:.4f} | "
        f"adaln_scale {run.model.largest_scale():.3f}"
    )
    return f"{text} | loss_scale {run.scaler.get_scale():g}" if run.scaler.is_enabled() else text


def tell(log: Any, text: str) -> None:
    """Prints a line and writes it to the log."""
    print(text, flush=True)
    log.write(text + "\n")
    log.flush()


def finish(run: Run, log: Any, first: float, last: float) -> None:
    """Says how it went, and what the model makes of noisy texts."""
    model = run.model if run.average is None else run.average
    found = exact_match(model, run.texts, run.settings, run.device)
    tell(log, " | ".join(["evaluation", *(f"{name} {value:.3f}" for name, value in found.items())]))
    tell(log, f"done after {run.step} steps: loss from {first:.4f} to {last:.4f}")


def save_checkpoint(run: Run) -> None:
    """Writes everything that a run needs to go on."""
    folder = run.out / "checkpoints"
    folder.mkdir(exist_ok=True)
    state = {
        "step": run.step,
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "scaler": run.scaler.state_dict(),
        "ema": None if run.average is None else run.average.state_dict(),
    }
    path = folder / f"step-{run.step:06d}.pt"
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


def load_checkpoint(run: Run, path: Path) -> None:
    """Takes model, optimizer and step from a checkpoint."""
    try:
        state = torch.load(path, map_location=run.device, weights_only=True)
        run.model.load_state_dict(state["model"])
        run.optimizer.load_state_dict(state["optimizer"])
        run.scaler.load_state_dict(state["scaler"] if run.scaler.is_enabled() else {})
        if run.average is not None and state["ema"] is not None:
            run.average.load_state_dict(state["ema"])
        run.step = int(state["step"])
    except FileNotFoundError:
        raise SettingsError(f"--resume {path}: there is no such file") from None
    except Exception as error:
        why = " ".join(str(error).split()[:24]) or repr(error)
        raise SettingsError(
            f"--resume {path}: not a checkpoint of this model ({why} ...); "
            "resume with the settings it was made with"
        ) from None


if __name__ == "__main__":
    main()
