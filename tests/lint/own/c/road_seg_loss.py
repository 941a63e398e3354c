import torch
import torch.nn.functional as F
from torch import nn


class OhemCE(nn.Module):
    def __init__(self, n_classes: int, thresh: float = 0.7, min_kept: int = 100_000, ignore: int = 255):
        super().__init__()
        self.n, self.ignore, self.min_kept = n_classes, ignore, min_kept
        self.thresh = thresh

    def forward(self, logits, target):
        target = target.long()
        too_big = (target >= self.n) & (target != self.ignore)
        target[too_big] = self.n - 1
        loss = F.cross_entropy(logits, target, ignore_index=self.ignore, reduction="none").flatten()
        with torch.no_grad():
            p = logits.softmax(1).gather(1, target.clamp(max=self.n - 1).unsqueeze(1)).flatten()
            k = min(self.min_kept, p.numel() - 1)
            cut = torch.maximum(p.sort().values[k], p.new_tensor(self.thresh))
        keep = (p < cut) & (target.flatten() != self.ignore)
        return (loss * keep).sum() / keep.sum().clamp(min=1)


class EdgeHead(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(c, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 1, 1), nn.Sigmoid())

    def forward(self, x):
        return self.conv(x)


def edge_loss(head: EdgeHead, feat, edge):
    p = head(feat)
    p = F.interpolate(p, size=edge.shape[-2:], mode="nearest")
    return F.binary_cross_entropy(p, edge.float())
