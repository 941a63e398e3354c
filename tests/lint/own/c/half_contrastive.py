import torch
import torch.nn.functional as F
from torch import nn


class Projector(nn.Module):
    def __init__(self, d_in: int, d_out: int = 128):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d_in, d_in), nn.ReLU(inplace=True), nn.Linear(d_in, d_out))

    def forward(self, x):
        return self.net(x)


def l2norm16(z: torch.Tensor) -> torch.Tensor:
    z = z.half()
    n = torch.linalg.vector_norm(z, dim=1, keepdim=True)
    return z / n.clamp(min=1e-8)


def l2norm32(z: torch.Tensor) -> torch.Tensor:
    n = z.float().norm(dim=1, keepdim=True)
    return z.float() / n.clamp(min=1e-8)


def nt_xent(z1, z2, tau=0.2):
    z = torch.cat([l2norm16(z1), l2norm16(z2)])
    sim = (z @ z.t()).float() / tau
    sim.fill_diagonal_(-1e9)
    n = z1.size(0)
    target = torch.arange(2 * n, device=z.device).roll(n)
    return F.cross_entropy(sim, target)


def alignment(z1, z2):
    return (l2norm32(z1) - l2norm32(z2)).square().sum(1).mean()


@torch.no_grad()
def momentum_update(online, target, m=0.996):
    for a, b in zip(online.parameters(), target.parameters()):
        b.mul_(m).add_(a, alpha=1 - m)
