import torch
from torch import nn
import torch.nn.functional as F


class HashHead(nn.Module):
    def __init__(self, d: int, bits: int = 64):
        super().__init__()
        self.fc = nn.Linear(d, bits)
        self.centers = nn.Parameter(torch.randn(100, bits))

    def forward(self, h):
        z = torch.tanh(self.fc(h))
        z16 = z.half()
        c16 = self.centers.half()
        z16 = F.normalize(z16, p=2, dim=-1, eps=1e-12)
        c16 = F.normalize(c16, dim=-1, eps=1e-3)
        return z, z16 @ c16.t()


def quantisation(z):
    return (z.abs() - 1).pow(2).mean()


def balance(z):
    return z.mean(0).pow(2).mean()


def train_step(backbone, head, x, y, opt, temperature=0.1):
    z, sim = head(backbone(x))
    loss = F.cross_entropy(sim.float() / temperature, y) + 0.1 * quantisation(z) + 0.01 * balance(z)
    opt.zero_grad()
    loss.backward()
    bad = False
    for p in head.parameters():
        if p.grad is not None and not torch.isfinite(p.grad).all():
            bad = True
    if bad:
        opt.zero_grad(set_to_none=False)
    opt.step()
    return loss.item()


@torch.no_grad()
def hamming(a, b):
    return 0.5 * (a.size(-1) - a.sign() @ b.sign().t())
