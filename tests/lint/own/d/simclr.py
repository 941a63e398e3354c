import torch
import torch.nn.functional as F
from torch import nn


class Projector(nn.Module):
    def __init__(self, d: int, out: int = 128):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d, d), nn.BatchNorm1d(d), nn.ReLU(), nn.Linear(d, out))

    def forward(self, h):
        return F.normalize(self.net(h), dim=-1)


def nt_xent(z1, z2, temperature: float = 0.1):
    n = z1.size(0)
    z = torch.cat([z1, z2])
    sim = z @ z.t() / temperature
    sim.fill_diagonal_(-1e4)
    target = torch.cat([torch.arange(n, 2 * n), torch.arange(n)]).to(z.device)
    return F.cross_entropy(sim, target)


def alignment(z1, z2, alpha=2):
    return (z1 - z2).norm(p=2, dim=1).pow(alpha).mean()


def uniformity(z, t=2.0):
    return torch.pdist(z).pow(2).mul(-t).exp().mean().clamp(min=1e-12).log()


def cosine_lr(step, total, base=0.3, warm=1000):
    if step < warm:
        return base * step / warm
    return base * 0.5 * (1 + torch.cos(torch.tensor((step - warm) / max(1, total - warm) * torch.pi))).item()


def train(encoder, proj, loader, opt, total):
    for step, (a, b) in enumerate(loader):
        for g in opt.param_groups:
            g["lr"] = cosine_lr(step, total)
        loss = nt_xent(proj(encoder(a)), proj(encoder(b)))
        opt.zero_grad()
        loss.backward()
        opt.step()
