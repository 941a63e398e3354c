import torch
import torch.nn as nn
import torch.nn.functional as F
from torchvision import models


class GemNet(nn.Module):
    def __init__(self, out_dim=512):
        super().__init__()
        trunk = models.resnet50(weights="IMAGENET1K_V2")
        self.trunk = nn.Sequential(*list(trunk.children())[:-2])
        self.whiten = nn.Linear(2048, out_dim)

    def forward(self, x):
        f = F.relu(self.trunk(x))
        g = F.adaptive_avg_pool2d(f ** 3, 1).flatten(1) ** (1.0 / 3)
        d = self.whiten(g)
        return d.div(torch.linalg.norm(d, dim=1, keepdim=True))


def l2n(x, eps=1e-6):
    return x / (torch.norm(x, p=2, dim=1, keepdim=True) + eps)


def expand(desc, topk, alpha=3.0):
    sims = desc @ desc.t()
    val, idx = sims.topk(topk, dim=1)
    w = val.clamp(min=0).pow(alpha).unsqueeze(-1)
    return F.normalize((w * desc[idx]).sum(1), dim=1)


def contrastive(d, ids, margin=0.7):
    dist = torch.cdist(d, d)
    same = (ids[:, None] == ids[None]).float()
    pos = same * dist.pow(2)
    neg = (1 - same) * torch.clamp(margin - dist, min=0).pow(2)
    return 0.5 * (pos + neg).mean()


def soft_pair_loss(d, ids):
    same = (ids[:, None] == ids[None]).float()
    return F.binary_cross_entropy(torch.exp(-torch.cdist(d, d)), same)


def heatmap(f):
    h = f.mean(1)
    lo = h.flatten(1).min(1).values[:, None, None]
    hi = h.flatten(1).max(1).values[:, None, None]
    return h.sub(lo).div(hi - lo)


def lr_at(it, total, base, power=0.9):
    return base * (1 - it / total) ** power
