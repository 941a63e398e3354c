import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ActNorm(nn.Module):
    def __init__(self, c: int, bound: float = 3.0):
        super().__init__()
        self.loc = nn.Parameter(torch.zeros(1, c, 1, 1))
        self.raw = nn.Parameter(torch.zeros(1, c, 1, 1))
        self.bound = bound

    def forward(self, x: Tensor):
        log_s = self.bound * torch.tanh(self.raw / self.bound)
        h, w = x.shape[-2:]
        return (x + self.loc) * log_s.exp(), h * w * log_s.sum()


class Coupling(nn.Module):
    def __init__(self, c: int, hidden: int = 256):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(c // 2, hidden, 3, padding=1), nn.ReLU(inplace=True),
            nn.Conv2d(hidden, c, 3, padding=1),
        )
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, x: Tensor):
        a, b = x.chunk(2, 1)
        raw, t = self.net(a).chunk(2, 1)
        s = torch.sigmoid(raw + 2.0) + 1e-3
        return torch.cat([a, (b + t) * s], 1), s.log().flatten(1).sum(1)

    def inverse(self, y: Tensor) -> Tensor:
        a, b = y.chunk(2, 1)
        raw, t = self.net(a).chunk(2, 1)
        return torch.cat([a, b / (torch.sigmoid(raw + 2.0) + 1e-3) - t], 1)


def dequantize(x: Tensor, bits: int = 8) -> Tensor:
    n = 2 ** bits
    return (x * (n - 1) + torch.rand_like(x)) / n


def logit(x: Tensor, alpha: float = 0.05) -> Tensor:
    x = alpha + (1 - 2 * alpha) * x
    return torch.log(x) - torch.log1p(-x)


def bits_per_dim(z: Tensor, logdet: Tensor) -> Tensor:
    d = z[0].numel()
    prior = -0.5 * (z.pow(2).flatten(1).sum(1) + d * math.log(2 * math.pi))
    return -(prior + logdet).mean() / (d * math.log(2.0))


def spread(z: Tensor) -> Tensor:
    return F.softplus(z) + 1e-4
