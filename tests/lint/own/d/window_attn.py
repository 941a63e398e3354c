import torch
from torch import nn
import torch.nn.functional as F


class LocalAttention(nn.Module):
    """Each query sees itself and the w positions before it."""

    def __init__(self, dim: int, heads: int, window: int = 64):
        super().__init__()
        self.heads, self.window = heads, window
        self.dh = dim // heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def band(self, n, device):
        i = torch.arange(n, device=device)
        d = i[:, None] - i[None]
        return (d >= 0) & (d <= self.window)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, self.dh).permute(2, 0, 3, 1, 4)
        s = torch.einsum("bhid,bhjd->bhij", q, k) * self.dh ** -0.5
        s = s.masked_fill(~self.band(n, x.device), float("-inf"))
        return self.out((s.softmax(-1) @ v).transpose(1, 2).reshape(b, n, c))


class CrossAttention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.scale = dim ** -0.5
        self.to_q, self.to_k, self.to_v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x, ctx):
        w = (self.to_q(x) @ self.to_k(ctx).transpose(1, 2) * self.scale).softmax(-1)
        return w @ self.to_v(ctx)


class FlashBlock(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.h, self.qkv = heads, nn.Linear(dim, 3 * dim)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.h, c // self.h).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, n, c)
