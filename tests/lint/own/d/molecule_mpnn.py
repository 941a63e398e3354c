import torch
from torch import nn


class RadialBasis(nn.Module):
    def __init__(self, n=32, cutoff=5.0):
        super().__init__()
        self.register_buffer("mu", torch.linspace(0, cutoff, n))
        self.cutoff, self.gamma = cutoff, n / cutoff

    def forward(self, d):
        env = 0.5 * (torch.cos(d * torch.pi / self.cutoff) + 1) * (d < self.cutoff)
        return torch.exp(-self.gamma * (d.unsqueeze(-1) - self.mu) ** 2) * env.unsqueeze(-1)


class Interaction(nn.Module):
    def __init__(self, d, n_rbf=32):
        super().__init__()
        self.filt = nn.Sequential(nn.Linear(n_rbf, d), nn.SiLU(), nn.Linear(d, d))
        self.upd = nn.Linear(d, d)

    def forward(self, h, pos, src, dst, rbf):
        diff = pos[src] - pos[dst]
        dist = (diff ** 2).sum(-1) ** 0.5
        msg = h[src] * self.filt(rbf(dist))
        agg = torch.zeros_like(h).index_add(0, dst, msg)
        deg = torch.zeros(h.size(0), device=h.device).index_add(0, dst, torch.ones_like(dist))
        agg = agg / deg.unsqueeze(-1)
        agg = torch.nan_to_num_(agg, nan=0.0)
        return h + self.upd(agg)


def energy_forces(model, z, pos, src, dst):
    pos.requires_grad_(True)
    e = model(z, pos, src, dst)
    f = -torch.autograd.grad(e.sum(), pos, create_graph=True)[0]
    return e, f


def loss_fn(e, f, e_ref, f_ref, rho=0.99):
    return (1 - rho) * (e - e_ref).pow(2).mean() + rho * (f - f_ref).pow(2).sum(-1).mean()
