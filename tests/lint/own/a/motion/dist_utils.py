from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn


def world() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def all_finite(*tensors: torch.Tensor) -> bool:
    """True only when every tensor is finite on every rank."""
    ok = torch.stack([torch.isfinite(t.detach()).all() for t in tensors]).all().float()
    if world() > 1:
        dist.all_reduce(ok, op=dist.ReduceOp.MIN)
    return bool(ok.item())


def mean_across(x: torch.Tensor) -> torch.Tensor:
    if world() == 1:
        return x
    x = x.detach().clone()
    dist.all_reduce(x)
    return x / world()


def finish(scaler: torch.amp.GradScaler, opt: torch.optim.Optimizer, params: list[nn.Parameter], max_norm: float):
    scaler.unscale_(opt)
    norm = nn.utils.clip_grad_norm_(params, max_norm)
    scaler.step(opt)
    scaler.update()
    opt.zero_grad(set_to_none=True)
    return norm
