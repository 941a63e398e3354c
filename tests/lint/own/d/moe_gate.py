import torch
from torch import nn
import torch.nn.functional as F


class NoisyTopK(nn.Module):
    def __init__(self, d: int, experts: int, k: int = 2):
        super().__init__()
        self.k = k
        self.w_gate = nn.Parameter(torch.empty(d, experts))
        self.w_noise = nn.Parameter(torch.empty(d, experts))
        nn.init.normal_(self.w_gate, std=0.02)

    def forward(self, x):
        clean = x @ self.w_gate
        if self.training:
            clean = clean + torch.randn_like(clean) * F.softplus(x @ self.w_noise)
        top, idx = clean.topk(self.k, dim=-1)
        gates = torch.full_like(clean, float("-inf")).scatter(-1, idx, top).softmax(-1)
        return gates, idx


def load_balance(gates, idx, experts):
    frac = F.one_hot(idx, experts).float().mean((0, 1))
    return experts * (frac * gates.mean(0)).sum()


def cv_squared(load):
    return load.float().var() / load.float().mean().pow(2)


def router_z(logits):
    return torch.logsumexp(logits, -1).pow(2).mean()


class MoE(nn.Module):
    def __init__(self, d, h, experts):
        super().__init__()
        self.gate = NoisyTopK(d, experts)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(d, h), nn.GELU(), nn.Linear(h, d)) for _ in range(experts))

    def forward(self, x):
        gates, _ = self.gate(x)
        y = torch.stack([e(x) for e in self.experts], -2)
        return torch.nan_to_num((gates.unsqueeze(-1) * y).sum(-2))
