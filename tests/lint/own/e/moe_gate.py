import torch
from torch import nn
import torch.nn.functional as F


class NoisyTopK(nn.Module):
    def __init__(self, dim: int, experts: int, k: int = 2):
        super().__init__()
        self.k = k
        self.w_gate = nn.Parameter(torch.empty(dim, experts))
        self.w_noise = nn.Parameter(torch.zeros(dim, experts))

    def forward(self, x):
        clean = x @ self.w_gate
        if self.training:
            clean = clean + torch.randn_like(clean) * F.softplus(x @ self.w_noise)
        top, idx = clean.topk(self.k, dim=-1)
        gates = torch.zeros_like(clean).scatter(-1, idx, top.softmax(-1))
        return gates


def cv_squared(load):
    return load.var(unbiased=False) / (load.mean() ** 2 + 1e-10)


class MoE(nn.Module):
    def __init__(self, dim, experts=8):
        super().__init__()
        self.gate = NoisyTopK(dim, experts)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)) for _ in range(experts))

    def forward(self, x):
        g = self.gate(x)
        y = torch.stack([e(x) for e in self.experts], -1)
        y = (y * g.unsqueeze(-2)).sum(-1)
        y = torch.nan_to_num(y, nan=0.0, posinf=1e4, neginf=-1e4)
        return y, cv_squared(g.flatten(0, -2).sum(0))
