import math

import torch
from torch import nn


class Pointer(nn.Module):
    """Additive pointer over the encoder states of a combinatorial policy."""

    def __init__(self, d):
        super().__init__()
        self.W1, self.W2 = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.v = nn.Linear(d, 1, bias=False)
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, enc, query, visited):
        u = self.v(torch.tanh(self.W1(enc) + self.W2(query).unsqueeze(1))).squeeze(-1)
        u[visited] = -math.inf
        return self.softmax(u)


class Glimpse(Pointer):
    def forward(self, enc, query, visited):
        u = self.v(torch.tanh(self.W1(enc) + self.W2(query).unsqueeze(1))).squeeze(-1)
        done = visited.all(dim=-1, keepdim=True)
        u = u.masked_fill(visited & ~done, -math.inf)
        p = self.softmax(u)
        return torch.where(done, torch.zeros_like(p), p)


def reinforce_loss(log_probs, lengths, baseline, alive):
    adv = (lengths - baseline).detach()
    return (adv * (log_probs * alive).sum(1)).sum() / alive.sum()


def tour_length(xy: torch.Tensor, perm: torch.Tensor) -> torch.Tensor:
    p = xy.gather(1, perm.unsqueeze(-1).expand(-1, -1, 2))
    return (p - p.roll(-1, dims=1)).norm(dim=-1).sum(1)


def entropy(p):
    return -(p * torch.log(p)).sum(-1).mean()


def entropy_ok(p):
    return -(p * p.clamp_min(1e-9).log()).sum(-1).mean()
