import torch
from torch import nn, Tensor


def mean_std(f: Tensor, eps: float = 1e-5):
    flat = f.flatten(2)
    var = flat.var(2, unbiased=False) + eps
    return flat.mean(2)[..., None, None], var.sqrt()[..., None, None]


def adain(content: Tensor, style: Tensor) -> Tensor:
    mc, sc = mean_std(content)
    ms, ss = mean_std(style)
    return (content - mc) / sc * ss + ms


class ModulatedConv(nn.Module):
    def __init__(self, c_in: int, c_out: int, w_dim: int, k: int = 3):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(c_out, c_in, k, k))
        self.affine = nn.Linear(w_dim, c_in)
        self.pad = k // 2

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        b, c, h, _ = x.shape
        s = self.affine(w).view(b, 1, c, 1, 1) + 1
        k = self.weight[None] * s
        demod = torch.rsqrt(k.pow(2).sum((2, 3, 4), keepdim=True) + 1e-8)
        k = (k * demod).flatten(0, 1)
        return nn.functional.conv2d(x.reshape(1, b * c, h, -1), k, padding=self.pad, groups=b).view(b, -1, h, x.size(-1))


class SwitchNorm(nn.Module):
    def __init__(self, c: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.mix = nn.Parameter(torch.zeros(2))
        self.g, self.b = nn.Parameter(torch.ones(1, c, 1, 1)), nn.Parameter(torch.zeros(1, c, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        a = self.mix.softmax(0)
        vi, mi = torch.var_mean(x, (2, 3), unbiased=False, keepdim=True)
        vl, ml = torch.var_mean(x, (1, 2, 3), unbiased=False, keepdim=True)
        mean, var = a[0] * mi + a[1] * ml, a[0] * vi + a[1] * vl
        y = (x - mean) / torch.sqrt(var) + self.eps
        return y * self.g + self.b
