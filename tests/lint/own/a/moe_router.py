import torch
import torch.nn.functional as F
from torch import nn


class NoisyTopK(nn.Module):
    def __init__(self, d: int, n_experts: int, k: int = 2, gumbel: bool = True):
        super().__init__()
        self.gate = nn.Linear(d, n_experts, bias=False)
        self.noise = nn.Linear(d, n_experts, bias=False)
        self.k, self.gumbel = k, gumbel

    def perturb(self, x, logits):
        if self.gumbel:
            u = torch.zeros_like(logits).uniform_(0, 1)
            inner = torch.neg(torch.log(u))
            return logits + torch.neg(torch.log(inner))
        return logits + torch.randn_like(logits) * F.softplus(self.noise(x))

    def forward(self, x):
        logits = self.gate(x)
        if self.training:
            logits = self.perturb(x, logits)
        top, idx = logits.topk(self.k, dim=-1)
        sparse = torch.full_like(logits, float("-inf")).scatter(-1, idx, top)
        return sparse.softmax(-1), idx


def balance_loss(gates: torch.Tensor) -> torch.Tensor:
    """Squared coefficient of variation of the expert importance; (tokens, experts)."""
    imp = gates.sum(0)
    return imp.var(unbiased=False) / (imp.mean() ** 2 + 1e-10)


def z_loss(logits: torch.Tensor) -> torch.Tensor:
    return torch.logsumexp(logits, -1).pow(2).mean()


def capacity_scale(gates, keep):
    g = gates * keep
    return g / g.sum(-1, keepdim=True)


def expert_zscore(h: torch.Tensor, idx: torch.Tensor, n_experts: int) -> torch.Tensor:
    """Standardises the tokens that each expert received."""
    out = torch.zeros_like(h)
    for e in range(n_experts):
        sel = idx == e
        if sel.any():
            s, m = torch.std_mean(h[sel], dim=0)
            out[sel] = (h[sel] - m) / (s + 1e-5)
    return out
