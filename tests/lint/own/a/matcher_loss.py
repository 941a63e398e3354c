import math

import torch
from torch import Tensor, nn
import torch.nn.functional as nnf


def sinkhorn(cost: Tensor, mask: Tensor, eps: float = 0.1, n_iter: int = 20) -> Tensor:
    logk = (-cost / eps).masked_fill(~mask, -math.inf)
    assert not (logk == -math.inf).all(), "nothing to match"
    for _ in range(n_iter):
        logk = logk - logk.logsumexp(-1, keepdim=True)
        logk = logk - logk.logsumexp(-2, keepdim=True)
    return logk.exp()


class KeypointMatcher(nn.Module):
    def __init__(self, d: int):
        super().__init__()
        self.proj = nn.Linear(d, d)
        self.conf = nn.Linear(d, 1)

    def forward(self, a: Tensor, b: Tensor, valid_b: Tensor) -> Tensor:
        sim = self.proj(a) @ self.proj(b).transpose(1, 2) / a.size(-1) ** 0.5
        sim.masked_fill_(~valid_b.unsqueeze(1), -math.inf)
        if torch.isinf(sim).all():
            return torch.zeros_like(sim)
        return nnf.softmax(sim, dim=2)

    def confidence_loss(self, a: Tensor, y: Tensor) -> Tensor:
        c = self.conf(a).squeeze(-1)
        return nnf.binary_cross_entropy(c.sigmoid(), y)


def nll_matches(p: Tensor, gt: Tensor) -> Tensor:
    picked = p.gather(2, gt.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    keep = gt >= 0
    return -(torch.log(picked) * keep).sum() / keep.sum().clamp(min=1)


def ratio_test(d: Tensor, thr: float = 0.8) -> Tensor:
    two = d.topk(2, dim=-1, largest=False).values
    return two[..., 0] < thr * two[..., 1]


def relative_rotation_loss(f1: Tensor, f2: Tensor) -> Tensor:
    f1, f2 = nnf.normalize(f1, dim=-1), nnf.normalize(f2, dim=-1)
    cos = (f1 * f2).sum(-1)
    return torch.acos(torch.minimum(cos.clamp(min=-1.0), torch.ones_like(cos))).mean()
