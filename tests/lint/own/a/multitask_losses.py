import torch
import torch.nn as nn
import torch.nn.functional as F


class BoundedUncertainty(nn.Module):
    """Kendall weighting with log-variances kept in [-4, 4]."""

    def __init__(self, tasks):
        super().__init__()
        self.tasks = list(tasks)
        self.log_vars = nn.Parameter(torch.zeros(len(self.tasks)))

    def forward(self, losses):
        s = self.log_vars.clamp(-4.0, 4.0)
        return sum(torch.exp(-s[i]) * losses[t] + s[i] for i, t in enumerate(self.tasks))


def depth_loss(pred, gt, lam=0.5):
    valid = gt > 0
    n = int(valid.sum())
    if n == 0:
        return pred.sum() * 0
    d = torch.log(pred[valid].clamp(min=1e-3)) - torch.log(gt[valid])
    return d.pow(2).sum() / n - lam * (d.sum() / n) ** 2


def normal_loss(pred, gt, mask):
    cos = F.cosine_similarity(pred, gt, dim=1, eps=1e-6)
    return ((1 - cos) * mask).sum() / torch.clamp(mask.sum(), min=1.0)


def edge_loss(logits, edges):
    pos = edges.sum()
    w = (edges.numel() - pos) / torch.maximum(pos, torch.ones_like(pos))
    return F.binary_cross_entropy_with_logits(logits, edges, pos_weight=w)


def seg_loss(logits, y, ignore=255):
    keep = y.ne(ignore)
    ce = F.cross_entropy(logits, y, ignore_index=ignore, reduction="none")
    return ce.sum() / keep.sum().clamp_min(1)


def hinge(real, fake):
    return torch.clamp(1 - real, min=0).mean() + torch.clamp(1 + fake, min=0).mean()


def charbonnier(x, y, eps=1e-3):
    return torch.sqrt((x - y) ** 2 + eps ** 2).mean()


def report(losses):
    with torch.no_grad():
        return {k: v.detach().clamp(max=1e4).item() for k, v in losses.items()}
