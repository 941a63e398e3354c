import math

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class BesselBasis(nn.Module):
    def __init__(self, n=6, cutoff=4.0):
        super().__init__()
        self.register_buffer("freq", torch.arange(1, n + 1) * math.pi / cutoff)

    def forward(self, r):
        r = r.unsqueeze(-1)
        return torch.where(
            r > 0,
            torch.sin(self.freq * r) / r,
            self.freq,
        )


class EnergyNet(nn.Module):
    def __init__(self, n=6, hidden=24):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.rbf = BesselBasis(n)
        self.atom = nn.Sequential(nn.Linear(n, hidden), nn.SiLU(), nn.Linear(hidden, 1))

    def forward(self, dist):
        return self.atom(self.rbf(self.scale * dist).sum(2)).sum((1, 2))


def make_dataset(n=42, atoms=5):
    g = torch.Generator().manual_seed(19)
    dist = 0.8 + 2.5 * torch.rand(n, atoms, atoms - 1, generator=g)
    dist[33, 2, 1] = 0.0  # two atoms written at the same place in the file
    energy = (1.0 / (dist + 0.5)).sum((1, 2)) - 6.0
    return TensorDataset(dist, energy)


def main():
    torch.manual_seed(0)
    model = EnergyNet()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=7)
    for step, (dist, energy) in enumerate(DataLoader(make_dataset(), batch_size=6)):
        loss = nn.functional.smooth_l1_loss(model(dist), energy)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
