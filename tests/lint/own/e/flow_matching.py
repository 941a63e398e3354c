import torch
from torch import nn
import torch.nn.functional as F


def sample_t(n: int, device, eps: float = 1e-3) -> torch.Tensor:
    u = torch.sigmoid(torch.randn(n, device=device))
    return u * (1 - 2 * eps) + eps


def path(x0, x1, t, sigma_min: float = 1e-4):
    t = t.view(-1, *[1] * (x1.dim() - 1))
    xt = (1 - (1 - sigma_min) * t) * x0 + t * x1
    return xt, x1 - (1 - sigma_min) * x0


def fm_loss(net: nn.Module, x1: torch.Tensor, cond=None) -> torch.Tensor:
    t = sample_t(x1.size(0), x1.device)
    xt, v = path(torch.randn_like(x1), x1, t)
    err = (net(xt, t, cond) - v).square().flatten(1).mean(1)
    w = 1.0 / (1.0 - t)
    return (w.clamp(max=10.0) * err).mean()


@torch.no_grad()
def euler(net, shape, device, steps: int = 50, cond=None):
    x = torch.randn(shape, device=device)
    for i in range(steps):
        t = torch.full((shape[0],), i / steps, device=device)
        x = x + net(x, t, cond) / steps
    return x


def train(net, loader, steps=200_000, lr=1e-4, device="cuda"):
    opt = torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=0.0)
    warm = torch.optim.lr_scheduler.LinearLR(opt, start_factor=0.01, total_iters=1000)
    for step, (x, c) in zip(range(steps), loader):
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = fm_loss(net, x.to(device), c.to(device))
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        warm.step()
