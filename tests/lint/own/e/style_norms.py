import torch
from torch import nn


class AdaIN(nn.Module):
    def __init__(self, style: int, ch: int, eps: float = 1e-5):
        super().__init__()
        self.fc = nn.Linear(style, 2 * ch)
        self.eps = eps

    def forward(self, x, s):
        gamma, beta = self.fc(s)[..., None, None].chunk(2, 1)
        mean = x.mean((2, 3), keepdim=True)
        var = x.var((2, 3), keepdim=True, unbiased=False)
        x = (x - mean) * (var.rsqrt() + self.eps)
        return (1 + gamma) * x + beta


class ModulatedConv(nn.Module):
    def __init__(self, c_in: int, c_out: int, k: int = 3, style: int = 512):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(c_out, c_in, k, k))
        self.affine = nn.Linear(style, c_in)
        self.pad = k // 2

    def forward(self, x, s):
        b, c, h, w = x.shape
        wt = self.weight[None] * (self.affine(s) + 1)[:, None, :, None, None]
        wt = wt * torch.rsqrt(wt.pow(2).sum((2, 3, 4), keepdim=True) + 1e-8)
        out = nn.functional.conv2d(x.view(1, -1, h, w), wt.flatten(0, 1), padding=self.pad, groups=b)
        return out.view(b, -1, h, w)


def minibatch_std(x):
    std = x.std(dim=0, unbiased=False).mean()
    return torch.cat([x, std.expand(x.size(0), 1, *x.shape[2:])], 1)


def mix(w1, w2):
    t = torch.rand(w1.size(0), 1, device=w1.device)
    return torch.lerp(w1, w2, t)
