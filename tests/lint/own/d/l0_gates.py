import math
import torch
from torch import nn
import torch.nn.functional as F


class HardConcrete(nn.Module):
    def __init__(self, n: int, beta: float = 2 / 3, lo: float = -0.1, hi: float = 1.1):
        super().__init__()
        self.log_alpha = nn.Parameter(torch.empty(n).normal_(0, 0.01))
        self.beta, self.lo, self.hi = beta, lo, hi

    def sample(self):
        u = torch.rand_like(self.log_alpha)
        s = torch.sigmoid((torch.log(u) - torch.log(1 - u) + self.log_alpha) / self.beta)
        return (s * (self.hi - self.lo) + self.lo).clamp(0, 1)

    def penalty(self):
        return torch.sigmoid(self.log_alpha - self.beta * math.log(-self.lo / self.hi)).sum()

    def forward(self):
        if self.training:
            return self.sample()
        return (torch.sigmoid(self.log_alpha) * (self.hi - self.lo) + self.lo).clamp(0, 1)


class PrunedHead(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.gates = HardConcrete(heads)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k, v = (t.view(b, n, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        att = (q @ k.transpose(-1, -2)) * d ** -0.5
        y = att.softmax(-1) @ v * self.gates()[None, :, None, None]
        return self.out(y.transpose(1, 2).reshape(b, n, d))
