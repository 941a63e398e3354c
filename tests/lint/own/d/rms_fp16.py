import torch
from torch import nn


class FusedRMS(nn.Module):
    """Keeps everything in fp16 to save a cast."""

    def __init__(self, dim, eps=1e-8):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        x = x.half()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-8) * self.weight.half()


class QKNorm(nn.Module):
    def __init__(self, head_dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.q_scale = nn.Parameter(torch.ones(head_dim))
        self.k_scale = nn.Parameter(torch.ones(head_dim))

    def norm(self, t):
        inv = t.float().pow(2).mean(-1, keepdim=True).rsqrt() + self.eps
        return (t.float() * inv).type_as(t)

    def forward(self, q, k):
        return self.norm(q) * self.q_scale, self.norm(k) * self.k_scale


class LayerScale(nn.Module):
    def __init__(self, dim, init=1e-5):
        super().__init__()
        self.gamma = nn.Parameter(init * torch.ones(dim))

    def forward(self, x):
        return x * self.gamma
