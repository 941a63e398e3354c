import math

import torch
from torch import Tensor, nn


class VPSDE:
    def __init__(self, b0: float = 0.1, b1: float = 20.0, eps: float = 1e-3):
        self.b0, self.b1, self.eps = b0, b1, eps

    def marginal(self, t: Tensor):
        log_mean = -0.25 * t ** 2 * (self.b1 - self.b0) - 0.5 * t * self.b0
        std = torch.sqrt(1.0 - torch.exp(2.0 * log_mean))
        return torch.exp(log_mean), std

    def sample_t(self, n: int, device) -> Tensor:
        return torch.rand(n, device=device) * (1 - self.eps) + self.eps


class TimeEmbed(nn.Module):
    def __init__(self, d: int):
        super().__init__()
        half = d // 2
        self.register_buffer("f", torch.exp(-math.log(1e4) * torch.arange(half) / half))

    def forward(self, t):
        a = 1000 * t[:, None] * self.f
        return torch.cat([a.sin(), a.cos()], -1)


def dsm_loss(net, sde: VPSDE, x: Tensor) -> Tensor:
    t = sde.sample_t(len(x), x.device)
    mean, std = (v.view(-1, *[1] * (x.dim() - 1)) for v in sde.marginal(t))
    noise = torch.randn_like(x)
    score = net(mean * x + std * noise, t)
    return (score * std + noise).square().flatten(1).sum(1).mean()


@torch.no_grad()
def sample(net, sde: VPSDE, shape, steps=500, device="cuda"):
    x = torch.randn(shape, device=device)
    ts = torch.linspace(1.0, sde.eps, steps, device=device)
    dt = (1.0 - sde.eps) / steps
    for t in ts:
        beta = sde.b0 + t * (sde.b1 - sde.b0)
        drift = -0.5 * beta * x - beta * net(x, t.expand(len(x)))
        x = x - drift * dt + (beta * dt) ** 0.5 * torch.randn_like(x)
    return x.clamp(-1, 1)
