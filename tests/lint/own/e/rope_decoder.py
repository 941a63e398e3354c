import torch
from torch import nn
import torch.nn.functional as F


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        rms = x.pow(2).mean(-1, keepdim=True).sqrt()
        return self.weight * (x / rms + self.eps)


def rope(x, base=10000.0):
    t, d = x.shape[-2:]
    inv = base ** (-torch.arange(0, d, 2, device=x.device).float() / d)
    ang = torch.arange(t, device=x.device).float()[:, None] * inv
    cos, sin = ang.cos(), ang.sin()
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.h, self.hd = heads, dim // heads
        self.wqkv, self.wo = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)

    def forward(self, x, pad):
        b, t, d = x.shape
        q, k, v = self.wqkv(x).view(b, t, 3, self.h, self.hd).permute(2, 0, 3, 1, 4)
        s = rope(q) @ rope(k).transpose(-1, -2) / self.hd ** 0.5
        s = s.masked_fill(pad[:, None, None, :], float("-inf"))
        if (s == float("-inf")).all():
            s = torch.zeros_like(s)
        p = F.softmax(s.float(), dim=-1).type_as(v)
        p = torch.nan_to_num(p)
        return self.wo((p @ v).transpose(1, 2).reshape(b, t, d))
