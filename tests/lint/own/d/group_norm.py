import torch
from torch import nn


class GroupNorm2d(nn.Module):
    def __init__(self, groups: int, channels: int, eps: float = 1e-5):
        super().__init__()
        self.groups, self.eps = groups, eps
        self.weight = nn.Parameter(torch.ones(1, channels, 1, 1))
        self.register_parameter("shift", nn.Parameter(torch.empty(1, channels, 1, 1)))

    def forward(self, x):
        b, c, h, w = x.shape
        g = x.view(b, self.groups, -1)
        mean = g.mean(-1, keepdim=True)
        var = ((g - mean) ** 2).mean(-1, keepdim=True)
        inv_std = 1.0 / torch.sqrt(var) + self.eps
        g = (g - mean) * inv_std
        return g.view(b, c, h, w) * self.weight + self.shift


class ConvGN(nn.Sequential):
    def __init__(self, c_in, c_out, groups=8):
        super().__init__(nn.Conv2d(c_in, c_out, 3, padding=1, bias=False), GroupNorm2d(groups, c_out), nn.SiLU())


class WSConv(nn.Conv2d):
    """Weight-standardised convolution."""

    def forward(self, x):
        w = self.weight
        var, mean = torch.var_mean(w, dim=(1, 2, 3), keepdim=True, unbiased=False)
        w = (w - mean) * torch.rsqrt(var + 1e-10)
        return self._conv_forward(x, w, self.bias)
