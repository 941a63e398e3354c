import torch
from torch import nn
import torch.nn.functional as F


class GeM(nn.Module):
    def __init__(self, p: float = 3.0, eps: float = 1e-6):
        super().__init__()
        self.p, self.eps = nn.Parameter(torch.tensor(p)), eps

    def forward(self, x):
        return F.adaptive_avg_pool2d(x.clamp(min=self.eps).pow(self.p), 1).pow(1.0 / self.p).flatten(1)


class CubicPool(nn.Module):
    def forward(self, x):
        x = F.relu(x)
        return torch.pow(x.pow(3).mean((-2, -1)), 1.0 / 3)


class SignedRoot(nn.Module):
    """Signed square root, then l2, after bilinear pooling."""

    def forward(self, x):
        y = torch.sign(x) * torch.sqrt(x.abs() + 1e-10)
        return F.normalize(y, dim=-1)


class Retrieval(nn.Module):
    def __init__(self, backbone, d, out=512):
        super().__init__()
        self.backbone, self.pool = backbone, GeM()
        self.whiten = nn.Linear(d, out)

    def forward(self, x):
        return F.normalize(self.whiten(self.pool(self.backbone(x))), dim=-1)


def smooth_ap(sim, pos, tau=0.01):
    d = sim.unsqueeze(1) - sim.unsqueeze(2)
    rank = 1 + torch.sigmoid(d / tau).sum(1)
    pos_rank = 1 + (torch.sigmoid(d / tau) * pos.unsqueeze(1)).sum(-1)
    return 1 - ((pos_rank / rank) * pos).sum(-1).div(pos.sum(-1)).mean()
