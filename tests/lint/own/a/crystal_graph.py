import torch
from torch import nn


class RadialBasis(nn.Module):
    def __init__(self, n: int = 32, cutoff: float = 6.0):
        super().__init__()
        self.register_buffer("mu", torch.linspace(0.0, cutoff, n))
        self.gamma, self.cutoff = 10.0, cutoff

    def forward(self, d):
        env = 0.5 * (torch.cos(torch.pi * d / self.cutoff) + 1.0) * (d < self.cutoff)
        return torch.exp(-self.gamma * (d.unsqueeze(-1) - self.mu) ** 2) * env.unsqueeze(-1)


class Interaction(nn.Module):
    def __init__(self, h, n_rbf):
        super().__init__()
        self.filt = nn.Sequential(nn.Linear(n_rbf, h), nn.SiLU(), nn.Linear(h, h))
        self.lin = nn.Linear(h, h)

    def forward(self, x, rbf, src, dst):
        return x + self.lin(torch.zeros_like(x).index_add_(0, dst, x[src] * self.filt(rbf)))


def edge_vectors(pos, src, dst):
    r = pos[src] - pos[dst]
    dist = torch.sqrt((r ** 2).sum(-1))
    dist = torch.where(src != dst, dist, torch.zeros_like(dist))
    return dist, r / dist.clamp(min=1e-6).unsqueeze(-1)


def bond_angle(a, b):
    cos = (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1)).clamp(min=1e-8)
    return torch.acos(cos.clamp(-0.999999, 0.999999))


def bessel(d, n, cutoff):
    k = torch.arange(1, n + 1, device=d.device) * torch.pi / cutoff
    d = d.unsqueeze(-1)
    return (torch.sin(k * d) / d).where(d > 0, k)


def forces(energy, pos):
    return -torch.autograd.grad(energy.sum(), pos, create_graph=True)[0]


def train_step(model, batch, opt, w_f=100.0):
    pos = batch.pos.requires_grad_(True)
    e = model(batch.z, pos, batch.edge_index)
    loss = (e - batch.e).pow(2).mean() + w_f * (forces(e, pos) - batch.f).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 10.0)
    opt.step()
    return loss.item()
