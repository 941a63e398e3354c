"""Losses by name, for the sweep configs."""
from typing import Callable

import torch
from torch import Tensor, nn
import torch.nn.functional as F

SIMPLE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "l1": F.l1_loss,
    "huber": lambda p, t: F.huber_loss(p, t, delta=0.5),
    "bpr": lambda pos, neg: -(pos - neg).sigmoid().log().mean(),
    "bpr_stable": lambda pos, neg: F.softplus(neg - pos).mean(),
    "bce": lambda x, t: F.binary_cross_entropy(torch.sigmoid(x), t),
    "bce_logits": F.binary_cross_entropy_with_logits,
    "capped_mse": lambda p, t: torch.clamp(F.mse_loss(p, t), max=10.0),
}


def build(kind: str, mask: Tensor | None = None) -> Callable[[Tensor, Tensor], Tensor]:
    match kind:
        case "rmse":
            return lambda p, t: torch.sqrt(nn.MSELoss()(p, t))
        case "rmse_eps":
            return lambda p, t: torch.sqrt(F.mse_loss(p, t) + 1e-8)
        case "masked_l1" if mask is not None:
            return lambda p, t: ((p - t).abs() * mask).sum() / torch.count_nonzero(mask)
        case "masked_l2" if mask is not None and (n := int(mask.sum())) > 0:
            return lambda p, t: ((p - t).square() * mask).sum() / n
        case "log_cosh":
            return lambda p, t: ((p - t).abs() + F.softplus(-2 * (p - t).abs())).mean()
        case _:
            return SIMPLE[kind]


def hellinger(p: Tensor, q: Tensor) -> Tensor:
    return 0.5 * (p ** 0.5 - q ** 0.5).pow(2).sum(-1)


def hellinger_safe(p: Tensor, q: Tensor, eps: float = 1e-8) -> Tensor:
    return 0.5 * ((p + eps) ** 0.5 - (q + eps) ** 0.5).pow(2).sum(-1)
