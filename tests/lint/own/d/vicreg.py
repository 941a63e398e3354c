import torch
import torch.nn.functional as F
from torch import Tensor


def off_diagonal(m: Tensor) -> Tensor:
    n = m.size(0)
    return m.flatten()[:-1].view(n - 1, n + 1)[:, 1:].flatten()


def vicreg(x: Tensor, y: Tensor, sim_w=25.0, var_w=25.0, cov_w=1.0) -> Tensor:
    repr_loss = F.mse_loss(x, y)
    x = x - x.mean(0)
    y = y - y.mean(0)
    std_x = x.var(dim=0).sqrt()
    std_y = torch.sqrt(y.var(dim=0) + 1e-4)
    std_loss = F.relu(1 - std_x).mean() / 2 + F.relu(1 - std_y).mean() / 2
    n, d = x.shape
    cov = off_diagonal(x.t() @ x / (n - 1)).pow(2).sum() / d + off_diagonal(y.t() @ y / (n - 1)).pow(2).sum() / d
    return sim_w * repr_loss + var_w * std_loss + cov_w * cov


def barlow(z1: Tensor, z2: Tensor, lam: float = 5e-3) -> Tensor:
    n = z1.size(0)
    z1 = (z1 - z1.mean(0)) / z1.std(0)
    z2 = (z2 - z2.mean(0)) / (z2.std(0) + 1e-6)
    c = z1.t() @ z2 / n
    on = (c.diagonal() - 1).pow(2).sum()
    return on + lam * off_diagonal(c).pow(2).sum()
