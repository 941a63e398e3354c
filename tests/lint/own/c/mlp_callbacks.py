import math
from dataclasses import dataclass, field

import torch
from torch import nn


@dataclass
class Context:
    model: nn.Module
    opt: torch.optim.Optimizer
    step: int = 0
    logs: dict = field(default_factory=dict)


class Callback:
    def after_backward(self, ctx: Context) -> bool:
        return True


class ClipGrad(Callback):
    def __init__(self, max_norm: float = 1.0):
        self.max_norm = max_norm

    def after_backward(self, ctx):
        norm = nn.utils.clip_grad_norm_(ctx.model.parameters(), self.max_norm)
        ctx.logs["grad_norm"] = norm.item()
        return math.isfinite(ctx.logs["grad_norm"])


class FreezeRows(Callback):
    """Keeps the pretrained rows of the embedding as they are."""

    def __init__(self, rows: torch.Tensor):
        self.rows = rows

    def after_backward(self, ctx):
        ctx.model.emb.weight.grad[self.rows] = 0.0
        return True


class EMA(Callback):
    def __init__(self, model: nn.Module, decay: float = 0.999):
        self.decay = decay
        self.shadow = {k: v.detach().clone() for k, v in model.state_dict().items()}

    def after_backward(self, ctx):
        for k, v in ctx.model.state_dict().items():
            if v.is_floating_point():
                self.shadow[k].lerp_(v, 1 - self.decay)
        return True


def run(model, loader, loss_fn, callbacks, lr=1e-3, epochs=10):
    ctx = Context(model, torch.optim.NAdam(model.parameters(), lr=lr))
    for _ in range(epochs):
        for x, y in loader:
            ctx.opt.zero_grad(set_to_none=True)
            loss = loss_fn(model(x), y)
            loss.backward()
            ctx.logs["loss"] = loss.item()
            if all([cb.after_backward(ctx) for cb in callbacks]):
                ctx.opt.step()
            else:
                print("no update at", ctx.step, ctx.logs)
            ctx.step += 1
    return ctx
