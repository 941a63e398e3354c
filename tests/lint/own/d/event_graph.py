import torch
from torch import nn, Tensor
import torch.nn.functional as F


class NeighbourAttention(nn.Module):
    def __init__(self, d: int):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x: Tensor, nbr: Tensor, dt: Tensor, valid: Tensor) -> Tensor:
        s = (self.q(x).unsqueeze(1) * self.k(nbr)).sum(-1) / x.size(-1) ** 0.5
        s = s - torch.log1p(dt)
        s = s.masked_fill(~valid, -torch.inf)
        if s.eq(-torch.inf).all():
            return self.v(x)
        w = F.softmax(s, dim=1)
        return self.v(x) + (w.unsqueeze(-1) * self.v(nbr)).sum(1)


class TimeEncoder(nn.Module):
    def __init__(self, d: int):
        super().__init__()
        self.freq = nn.Parameter(torch.logspace(0, -4, d))

    def forward(self, dt: Tensor) -> Tensor:
        return torch.cos(dt.unsqueeze(-1) * self.freq)


class Decay(nn.Module):
    def __init__(self):
        super().__init__()
        self.rate = nn.Parameter(torch.tensor(0.1))

    def forward(self, dt: Tensor) -> Tensor:
        return 1 / (1 + (self.rate * dt).clamp(min=0).pow(0.25))


def hawkes_nll(lam: Tensor, integral: Tensor, event_mask: Tensor) -> Tensor:
    ll = (torch.log(lam + 1e-8) * event_mask).sum(-1) - integral
    return -ll.mean()
