"""Several optimizers under one GradScaler; gradients are unscaled in one place."""
from typing import Iterable

import torch
from torch import nn
from torch.optim import Optimizer


class MultiOptStepper:
    def __init__(self, optimizers: Iterable[Optimizer], max_norm: float = 1.0):
        self.optimizers = list(optimizers)
        self.scaler = torch.amp.GradScaler("cuda")
        self.max_norm = max_norm
        self.skipped = 0

    def _params(self):
        return [p for o in self.optimizers for g in o.param_groups for p in g["params"] if p.grad is not None]

    def _unscale(self):
        for o in self.optimizers:
            self.scaler.unscale_(o)

    def backward(self, loss: torch.Tensor):
        self.scaler.scale(loss).backward()

    def step(self) -> float:
        self._unscale()
        params = self._params()
        norm = nn.utils.clip_grad_norm_(params, self.max_norm, norm_type=float("inf"))
        for o in self.optimizers:
            self.scaler.step(o)
        before = self.scaler.get_scale()
        self.scaler.update()
        self.skipped += int(self.scaler.get_scale() < before)
        for o in self.optimizers:
            o.zero_grad(set_to_none=True)
        return float(norm)


def train(gen, disc, loader, stepper: MultiOptStepper, lossf):
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = lossf(disc(gen(x)), y)
        stepper.backward(loss)
        norm = stepper.step()
        print(f"loss {loss.item():.3f} |g|_inf {norm:.3f}")
