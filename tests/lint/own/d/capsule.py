import torch
from torch import nn
import torch.nn.functional as F


def squash(s, dim=-1):
    sq = (s ** 2).sum(dim, keepdim=True)
    return sq / (1 + sq) * s / torch.sqrt(sq)


class Caps(nn.Module):
    def __init__(self, n_in, d_in, n_out, d_out, iters=3):
        super().__init__()
        self.W = nn.Parameter(0.01 * torch.randn(1, n_in, n_out, d_out, d_in))
        self.iters = iters

    def forward(self, x):
        u = (self.W @ x[:, :, None, :, None]).squeeze(-1)
        b = torch.zeros(u.shape[:3], device=x.device)
        for i in range(self.iters):
            c = F.softmax(b, dim=2)
            v = squash((c.unsqueeze(-1) * u).sum(1))
            if i < self.iters - 1:
                b = b + (u.detach() * v.unsqueeze(1)).sum(-1)
        return v


def margin_loss(v, y, up=0.9, low=0.1, lam=0.5):
    length = v.norm(dim=-1)
    t = F.one_hot(y, v.size(1)).float()
    pos = t * F.relu(up - length).pow(2)
    neg = lam * (1 - t) * F.relu(length - low).pow(2)
    loss = (pos + neg).sum(-1).mean()
    return torch.clamp(loss, 0.0, 5.0)
