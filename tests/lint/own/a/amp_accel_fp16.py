"""Contrastive pre-training; fp16 through Accelerate."""
import torch
from accelerate import Accelerator
from torch import nn
import torch.nn.functional as F


class Projector(nn.Module):
    def __init__(self, d, out=128):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(d, d), nn.BatchNorm1d(d), nn.ReLU(), nn.Linear(d, out))

    def forward(self, x):
        return F.normalize(self.mlp(x), dim=-1)


def barlow(z1, z2, lam=5e-3):
    z1 = (z1 - z1.mean(0)) / z1.std(0)
    z2 = (z2 - z2.mean(0)) / (z2.std(0, correction=0) + 1e-6)
    c = z1.t() @ z2 / z1.size(0)
    diag = torch.diagonal(c)
    return (diag - 1).pow(2).sum() + lam * (c.pow(2).sum() - diag.pow(2).sum())


def variance_hinge(z):
    return F.relu(1.0 - z.var(dim=0, unbiased=False).sqrt()).mean()


def variance_hinge_eps(z):
    return F.relu(1.0 - torch.sqrt(z.var(dim=0, unbiased=False) + 1e-4)).mean()


def main(backbone, d, loader, epochs=100):
    accelerator = Accelerator(mixed_precision="fp16")
    model = nn.Sequential(backbone, Projector(d))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, opt, loader = accelerator.prepare(model, opt, loader)
    for epoch in range(epochs):
        for a, b in loader:
            z1, z2 = model(a).float(), model(b).float()
            loss = barlow(z1, z2) + variance_hinge(z1) + variance_hinge_eps(z2)
            accelerator.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
        accelerator.print(epoch, loss.item())
