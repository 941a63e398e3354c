"""Trains the latent diffusion language model.

python train.py --config config.yaml [--set training.learning_rate=3.0e-5] [--out runs/mmdit]
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import data
import saving
import torch
from losses import bounded, corrupt, latent_error, masked_cross_entropy
from model import SIZES, Attention, MMDiT
from settings import ConfigError, arguments, read
from torch.utils.data import DataLoader

_SHAPE = ("width", "depth", "heads", "text_length", "latent_count", "latent_dim")


class Run:
    """Everything that one training run consists of."""

    def __init__(self, config, out):
        self.config, self.out = config, Path(out)
        self.device = _device(config["device"])
        self.shape = dict(zip(_SHAPE, SIZES[config["size"]], strict=True))
        self.shape["vocabulary"] = len(data.words())
        torch.manual_seed(config["seed"])
        self.train, self.held_out = _corpus(config, self.shape, out)
        self.model = MMDiT(**self.shape, attention=self.attention).to(self.device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=config["training.learning_rate"],
            weight_decay=config["training.weight_decay"],
            fused=True,
        )
        self.scheduler = self.schedule()

    def attention(self, width, heads):
        """Returns the attention of one block."""
        form, qk_norm = (self.config[f"model.{name}"] for name in ("attention", "qk_norm"))
        return Attention(width, heads, form=form, qk_norm=qk_norm)

    @property
    def parts(self):
        """What a checkpoint holds."""
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    @property
    def step(self):
        """The number of steps so far: as many as the schedule has made."""
        return self.scheduler.last_epoch

    def schedule(self):
        """Returns a linear warm-up, then a cosine down to the lowest rate."""
        warmup, steps = (self.config[f"training.{name}"] for name in ("warmup_steps", "max_steps"))
        lowest = self.config["training.min_lr"] / self.config["training.learning_rate"]

        def factor(step):
            if step < warmup:
                return (step + 1) / warmup
            done = min((step - warmup) / max(steps - warmup, 1), 1.0)
            return lowest + (1 - lowest) * 0.5 * (1 + math.cos(math.pi * done))

        return torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)

    def keep_rate(self):
        """Goes on at the rate of the config; a checkpoint brings the one it was trained at."""
        rate, schedule = self.config["training.learning_rate"], self.scheduler
        schedule.base_lrs = [rate] * len(schedule.base_lrs)
        for group, factor in zip(self.optimizer.param_groups, schedule.lr_lambdas, strict=True):
            group |= {"initial_lr": rate, "lr": rate * factor(self.step)}

    def batches(self):
        """Yields batches without end, from where the run has come to."""
        made = self.step * self.config["training.gradient_accumulation_steps"]
        epoch, passed = divmod(made, len(self.loader(0)))
        while True:
            for index, batch in enumerate(self.loader(epoch)):
                if index >= passed:
                    yield self.moved(batch)
            epoch, passed = epoch + 1, 0

    def loader(self, epoch):
        """Returns the batches of one epoch, in its order."""
        size = self.config["training.batch_size"]
        order = torch.Generator().manual_seed(self.config["seed"] + epoch)
        return DataLoader(self.train, size, shuffle=True, drop_last=True, generator=order)

    def moved(self, batch):
        """Returns a batch on the device."""
        return {name: value.to(self.device) for name, value in batch.items()}

    def terms(self, batch):
        """Returns the two terms of the loss: masked words, and latents."""
        config = self.config
        ratios = (config[f"diffusion.{end}_mask_ratio"] for end in ("min", "max"))
        seen, masked = corrupt(batch, *ratios)
        with self.autocast():
            logits, predicted = self.model(*seen)
        text = masked_cross_entropy(logits, batch["tokens"], masked, config["loss.text"])
        latent = latent_error(predicted, batch["latents"], config["loss.latent"])
        return bounded(text, config["loss.clamp"]), bounded(latent, config["loss.clamp"])

    def autocast(self):
        """The precision of the forward pass."""
        on = self.config["training.mixed_precision"] == "bf16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=on)

    @torch.no_grad()
    def evaluate(self):
        """Returns the share of masked words that are right, that of always guessing the commonest
        word, and the error of the latents as a part of their size.
        """
        generator = torch.Generator().manual_seed(0)
        commonest = self.train.tokens[self.train.tokens > data.END].mode().values
        right, by_chance, count, error, size = 0, 0, 0, 0.0, 0.0
        for batch in DataLoader(self.held_out, 64):
            seen, masked = corrupt(batch, 0.3, 0.3, generator)
            with self.autocast():
                logits, predicted = self.model(*(part.to(self.device) for part in seen))
            tokens = batch["tokens"][masked]
            right += (logits.argmax(-1).cpu()[masked] == tokens).sum().item()
            by_chance += (tokens == commonest).sum().item()
            count += len(tokens)
            error += (predicted.float().cpu() - batch["latents"]).square().sum().item()
            size += batch["latents"].square().sum().item()
        return {
            "eval_accuracy": right / max(count, 1),
            "eval_chance": by_chance / max(count, 1),
            "eval_latent_error": error / max(size, 1e-12),
        }


def main(words=None):
    """Trains, or says in one line why it cannot."""
    args = arguments(words)
    try:
        run = Run(read(args.config, args.set), args.out)
        if args.resume:
            saving.load(args.resume, run.parts, run.shape)
            run.keep_rate()
    except ConfigError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    run.out.mkdir(parents=True, exist_ok=True)
    with (run.out / "train.jsonl").open("a" if args.resume else "w", encoding="utf-8") as log:
        train(run, min(args.steps or math.inf, run.config["training.max_steps"]), log)
    return 0


def train(run, last, log):
    """The loop: terms, loss, backward; after each full step what there is to look after."""
    config, weight = run.config, run.config["training.latent_loss_weight"]
    accumulation = config["training.gradient_accumulation_steps"]
    gathered, spoiled = 0, False
    for batch in run.batches():
        if run.step >= last:
            break
        text_loss, latent_loss = run.terms(batch)
        loss = text_loss + weight * latent_loss
        if config["training.on_nan"] == "skip" and not torch.isfinite(loss):
            spoiled = True
        else:
            (loss / accumulation).backward()
        gathered += 1
        if gathered < accumulation:
            continue
        told = {"step": run.step, "lr": run.optimizer.param_groups[0]["lr"]}
        told |= {"loss": loss, "text_loss": text_loss, "latent_loss": latent_loss}
        told |= make_step(run, spoiled=spoiled)
        _tell(log, told)
        _look_after(run, last, log)
        gathered, spoiled = 0, False


def make_step(run, *, spoiled):
    """Checks and clips the gradients, and steps; returns what the log is told."""
    model, how = run.model, run.config["training.on_nan"]
    if how == "zero":
        zero_nan_gradients(model, run.step)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), run.config["training.max_grad_norm"])
    skipped = how == "skip" and (spoiled or not torch.isfinite(norm))
    if not skipped:
        run.optimizer.step()
    run.scheduler.step()
    run.optimizer.zero_grad()
    return {"grad_norm": norm, "skipped": True} if skipped else {"grad_norm": norm}


def zero_nan_gradients(model, step):
    """Sets gradients that are NaN to zero, and says so."""
    bad = [name for name, p in model.named_parameters() if torch.isnan(p.grad).any()]
    for name in bad:
        model.get_parameter(name).grad.zero_()
    if bad:
        print(f"WARNING step {step}: NaN gradients in {len(bad)} parameters, set to zero")


def _look_after(run, last, log):
    """Saves and evaluates when it is time to, and at the end."""
    config, step = run.config, run.step
    if step % config["training.save_steps"] == 0 or step == last:
        keep = config["training.save_total_limit"]
        saving.save(run.out / "checkpoints", step, run.parts, run.shape, keep)
    if step % config["training.eval_steps"] == 0 or step == last:
        _tell(log, {"step": step, **run.evaluate()})


def _tell(log, values):
    """Prints one line and writes it to the log."""
    numbers = {k: v.item() if isinstance(v, torch.Tensor) else v for k, v in values.items()}
    short = {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in numbers.items()}
    line = json.dumps(short)
    print(line)
    log.write(line + "\n")
    log.flush()


def _device(name):
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0]
        raise ConfigError(f"device is {name!r}: {why}; use auto, cpu or cuda") from None


def _corpus(config, shape, out):
    sizes = {name: shape[name] for name in ("text_length", "latent_count", "latent_dim")}
    named = {name: config[f"data.{name}"] for name in ("documents", "blank_lines")}
    if named["blank_lines"] > named["documents"]:
        raise ConfigError(
            f"data.blank_lines is {named['blank_lines']}, but data.documents only "
            f"{named['documents']}; lower the first"
        )
    train, held_out = data.load(out, seed=config["seed"], **named, **sizes)
    for part in (train, held_out):
        part.latents *= config["data.latent_scale"]
    if len(train) < config["training.batch_size"]:
        raise ConfigError(
            f"training.batch_size is {config['training.batch_size']}, but there are only "
            f"{len(train)} documents to train on; lower it, or raise data.documents"
        )
    return train, held_out


if __name__ == "__main__":
    sys.exit(main())
