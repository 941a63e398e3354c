import torch
from torch import nn


class BatchRenormLite(nn.Module):
    def __init__(self, d, eps=1e-5, momentum=0.1):
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.register_buffer("mean", torch.zeros(d))
        self.register_buffer("var", torch.ones(d))

    def forward(self, x):
        if self.training:
            mu, var = x.mean(0), x.var(0, unbiased=False)
            self.mean.lerp_(mu.detach(), self.momentum)
            self.var.lerp_(var.detach(), self.momentum)
        else:
            mu, var = self.mean, self.var
        inv_std = 1.0 / torch.sqrt(var) + self.eps
        return (x - mu) * inv_std


class Heteroscedastic(nn.Module):
    def __init__(self, d, h=64):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(d, h), BatchRenormLite(h), nn.ReLU(), nn.Linear(h, 2))

    def forward(self, x):
        mu, log_var = self.f(x).unbind(-1)
        return mu, log_var


def nll(mu, log_var, y):
    return (0.5 * torch.exp(-log_var) * (y - mu) ** 2 + 0.5 * log_var).mean()


def nll_softplus(mu, raw, y):
    var = nn.functional.softplus(raw) + 1e-4
    return (0.5 * (y - mu) ** 2 / var + 0.5 * var.log()).mean()


@torch.no_grad()
def calibration(mu, log_var, y, z=1.96):
    std = (0.5 * log_var.clamp(-20, 20)).exp()
    return ((y - mu).abs() < z * std).float().mean().item()
