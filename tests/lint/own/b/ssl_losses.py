import torch
import torch.nn.functional as F
from torch import Tensor, nn


def off_diagonal(m: Tensor) -> Tensor:
    n = m.size(0)
    return m.flatten()[:-1].view(n - 1, n + 1)[:, 1:].flatten()


class VICReg(nn.Module):
    def __init__(self, sim: float = 25.0, var: float = 25.0, cov: float = 1.0):
        super().__init__()
        self.sim, self.var, self.cov = sim, var, cov

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        inv = F.mse_loss(x, y)
        x, y = x - x.mean(0), y - y.mean(0)
        std_x = torch.sqrt(x.var(dim=0) + 1e-4)
        std_y = torch.sqrt(y.var(dim=0) + 1e-4)
        hinge = F.relu(1 - std_x).mean() / 2 + F.relu(1 - std_y).mean() / 2
        n, d = x.shape
        cx, cy = x.T @ x / (n - 1), y.T @ y / (n - 1)
        cov = off_diagonal(cx).pow(2).sum() / d + off_diagonal(cy).pow(2).sum() / d
        return self.sim * inv + self.var * hinge + self.cov * cov


class BarlowTwins(nn.Module):
    def __init__(self, lambd: float = 5e-3):
        super().__init__()
        self.lambd = lambd

    def forward(self, za: Tensor, zb: Tensor) -> Tensor:
        n = za.size(0)
        za = (za - za.mean(0)) / za.std(0)
        zb = (zb - zb.mean(0)) / zb.std(0)
        c = za.T @ zb / n
        on = (c.diagonal() - 1).pow(2).sum()
        return on + self.lambd * off_diagonal(c).pow(2).sum()
