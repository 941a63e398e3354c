import torch
from torch import nn


class FilterResponseNorm(nn.Module):
    def __init__(self, c, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.gamma = nn.Parameter(torch.ones(1, c, 1, 1))
        self.beta = nn.Parameter(torch.zeros(1, c, 1, 1))
        self.tau = nn.Parameter(torch.zeros(1, c, 1, 1))

    def forward(self, x):
        nu2 = torch.mean(x ** 2, dim=[2, 3], keepdim=True)
        x = x * (torch.rsqrt(nu2) + abs(self.eps))
        return torch.max(self.gamma * x + self.beta, self.tau)


class LocalContrast(nn.Module):
    """Subtractive and divisive normalisation over a window."""

    def __init__(self, k=9, eps=1e-4):
        super().__init__()
        self.pool, self.eps = nn.AvgPool2d(k, 1, k // 2, count_include_pad=False), eps

    def forward(self, x):
        x = x - self.pool(x)
        local = torch.sqrt(self.pool(x.pow(2)) + self.eps)
        return x / torch.max(local, local.mean((2, 3), keepdim=True))


class UnitRows(nn.Module):
    def __init__(self, eps=1e-8):
        super().__init__()
        self.eps = eps

    def forward(self, x):
        return x / x.norm(dim=-1, keepdim=True) + self.eps
