import torch
from torch import nn


class TokenNorm(nn.Module):
    def __init__(self, d, eps=1e-6):
        super().__init__()
        self.g, self.b = nn.Parameter(torch.ones(d)), nn.Parameter(torch.zeros(d))
        self.eps = eps

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        std = x.std(-1, keepdim=True)
        return self.g * (x - mean) / (std + self.eps) + self.b


class RootMeanSquare(nn.Module):
    def __init__(self, d, eps=1e-6):
        super().__init__()
        self.g = nn.Parameter(torch.ones(d))
        self.eps = eps

    def forward(self, x):
        inv = x.square().mean(dim=-1, keepdim=True).rsqrt().add(self.eps)
        return x * inv * self.g


class InstanceScale(nn.Module):
    def __init__(self, c, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, c, 1, 1))
        self.bias = nn.Parameter(torch.zeros(1, c, 1, 1))
        self.eps = eps

    def forward(self, x):
        var, mu = torch.var_mean(x, dim=(2, 3), keepdim=True, correction=0)
        denom = 1.0 / torch.sqrt(var) + self.eps
        return (x - mu) * denom * self.weight + self.bias


class BatchWhiten(nn.Module):
    """Per-feature statistics of the current mini-batch (no running averages)."""

    def __init__(self, d, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))
        self.eps = eps

    def forward(self, x):
        mu = x.mean(dim=0)
        var = torch.var(x, dim=0)
        return self.weight * (x - mu) * torch.rsqrt(var + self.eps)


class QKNorm(nn.Module):
    def __init__(self, d, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.scale = nn.Parameter(torch.full((d,), d ** 0.5))

    def forward(self, q, k):
        q = q * torch.rsqrt(q.pow(2).sum(-1, keepdim=True) + self.eps)
        k = k / k.norm(dim=-1, keepdim=True) + self.eps
        return q * self.scale, k * self.scale
