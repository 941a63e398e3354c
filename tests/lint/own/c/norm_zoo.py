import torch
from torch import Tensor, nn


class LayerNorm2d(nn.Module):
    def __init__(self, c: int, eps: float = 1e-6):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.ones(c)), nn.Parameter(torch.zeros(c))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) * torch.rsqrt(s + self.eps)
        return self.w[:, None, None] * x + self.b[:, None, None]


class PixelNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(1, keepdim=True).rsqrt() + 1e-8)


class QKNorm(nn.Module):
    def __init__(self, d: int, eps: float = 1e-6):
        super().__init__()
        self.g, self.eps = nn.Parameter(torch.ones(d)), eps

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        n = lambda t: t.float() / (t.float().norm(dim=-1, keepdim=True) + self.eps)
        return n(q).type_as(q) * self.g, n(k).type_as(k) * self.g


class MinibatchStd(nn.Module):
    """StyleGAN's extra channel: deviation over groups of the batch."""

    def __init__(self, group: int = 4):
        super().__init__()
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        g = min(self.group, b)
        y = x.view(g, -1, c, h, w)
        s = (y.var(0, unbiased=False) + 1e-8).sqrt().mean((1, 2, 3))
        return torch.cat([x, s.repeat(g).view(b, 1, 1, 1).expand(-1, 1, h, w)], 1)


class WeightStandardConv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        mean = w.mean((1, 2, 3), keepdim=True)
        std = w.std((1, 2, 3), keepdim=True)
        return self._conv_forward(x, (w - mean) / std, self.bias)
