"""The same training with nanguard in it: the guard around the loop, and its safe building blocks.

python guarded.py --config config.yaml [--set KEY=VALUE] [--out runs/guarded] [--resume auto]

No bad step reaches the weights. What the guard did stands in metrics.jsonl and events.jsonl below
OUT; its snapshots are there as well, and ``--resume`` goes on from the last good one.
"""

from __future__ import annotations

import math
import sys

import torch
from losses import corrupt
from model import Attention
from settings import ConfigError, arguments, read
from torch.nn import functional as F
from train import Run

from nanguard import Guard, NonFiniteError, Settings, ops


class SafeAttention(Attention):
    """Attention whose scores cannot overflow: heads of one length, and torch's own softmax."""

    def __init__(self, width, heads):
        super().__init__(width, heads, form="fused", qk_norm=False)
        self.norm = ops.RMSNorm(width // heads, elementwise_affine=False)

    def mix(self, queries, text, latent, keep):
        keys, values = (torch.cat(pair, dim=2) for pair in zip(text, latent, strict=True))
        mask = F.pad(keep, (0, latent[0].shape[2]), value=True)[:, None, None, :]
        return ops.attention(queries, keys, values, mask)


class GuardedRun(Run):
    """The run, from safe parts."""

    def __init__(self, config, out):
        super().__init__(config, out)
        self.empty_masks = ops.Counter()

    def schedule(self):
        """Returns a linear warm-up, then a cosine down to the lowest rate."""
        config = self.config
        return ops.warmup_cosine(
            self.optimizer,
            warmup_steps=config["training.warmup_steps"],
            total_steps=config["training.max_steps"],
            end_factor=min(config["training.min_lr"] / config["training.learning_rate"], 1.0),
        )

    def attention(self, width, heads):
        """Returns the attention of one block."""
        return SafeAttention(width, heads)

    def terms(self, batch):
        """Returns the two terms of the loss; that of a batch without masked words is 0."""
        ratios = (self.config[f"diffusion.{end}_mask_ratio"] for end in ("min", "max"))
        seen, masked = corrupt(batch, *ratios)
        with self.autocast():
            logits, predicted = self.model(*seen)
        text = ops.masked_cross_entropy(logits, batch["tokens"], masked, empties=self.empty_masks)
        return text, F.mse_loss(predicted.float(), batch["latents"])


def main(words=None):
    """Trains under the guard; returns 3 if the guard had to stop."""
    args = arguments(words)
    try:
        run = GuardedRun(read(args.config, args.set), args.out)
    except ConfigError as error:
        print(f"guarded.py: {error}", file=sys.stderr)
        return 2
    last = min(args.steps or math.inf, run.config["training.max_steps"])
    settings = Settings(disk_every=run.config["training.save_steps"])
    parts = {"scheduler": run.scheduler, "run_dir": run.out, "settings": settings}
    with Guard(run.model, run.optimizer, **parts) as guard:
        if args.resume:
            guard.resume()
        try:
            train(run, guard, last)
        except NonFiniteError as error:
            print(f"guarded.py: {error}", file=sys.stderr)
            return 3
        print(guard.summary())
    print(f"batches without a masked word: {run.empty_masks.value()}")
    print(run.evaluate())
    return 0


def train(run, guard, last):
    """The loop: the guard hands out batches, and makes a step only if all is well."""
    weight = run.config["training.latent_loss_weight"]
    accumulation = run.config["training.gradient_accumulation_steps"]
    while guard.updates < last:
        for index, batch in guard.enumerate(run.loader(guard.epoch)):
            text, latent = run.terms(run.moved(batch))
            loss = guard.loss(text=text / accumulation, latent=weight * latent / accumulation)
            guard.backward(loss)
            if (index + 1) % accumulation == 0:
                guard.step(max_norm=run.config["training.max_grad_norm"])
            if guard.updates >= last:
                return
        guard.end_epoch()


if __name__ == "__main__":
    sys.exit(main())
