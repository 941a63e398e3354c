import math

import torch
from torch import nn, Tensor


def pair_distances(pos: Tensor) -> Tensor:
    diff = pos[:, None] - pos[None]
    return diff.norm(dim=-1)


class Coulomb(nn.Module):
    def __init__(self, cutoff: float = 6.0):
        super().__init__()
        self.cutoff = cutoff
        self.log_strength = nn.Parameter(torch.zeros(()))

    def forward(self, pos: Tensor, charge: Tensor) -> Tensor:
        d = pair_distances(pos)
        inv = torch.where(d > 0, 1.0 / d, torch.zeros_like(d))
        env = 0.5 * (torch.cos(math.pi * d / self.cutoff) + 1.0) * (d < self.cutoff)
        return self.log_strength.clamp(-3, 3).exp() * (charge[:, None] * charge[None] * inv * env).sum() / 2


class RBF(nn.Module):
    def __init__(self, n: int = 64, cutoff: float = 6.0):
        super().__init__()
        self.register_buffer("mu", torch.linspace(0, cutoff, n))
        self.beta = (n / cutoff) ** 2

    def forward(self, d: Tensor) -> Tensor:
        return torch.exp(-self.beta * (d.unsqueeze(-1) - self.mu) ** 2)


def forces(model: nn.Module, pos: Tensor, charge: Tensor):
    pos = pos.requires_grad_(True)
    e = model(pos, charge)
    return e, -torch.autograd.grad(e, pos, create_graph=True)[0]


def energy_force_loss(model, batch, rho=0.99):
    e, f = forces(model, batch["pos"], batch["q"])
    return (1 - rho) * (e - batch["e"]) ** 2 + rho * (f - batch["f"]).square().mean()
