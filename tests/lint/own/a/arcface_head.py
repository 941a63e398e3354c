import math

import torch
from torch import nn
from torch.nn import Parameter
import torch.nn.functional as F


class ArcFace(nn.Module):
    def __init__(self, d, n_classes, s=64.0, m=0.5):
        super().__init__()
        self.s, self.m, self.n_classes = s, m, n_classes
        self.W = Parameter(torch.empty(n_classes, d))
        nn.init.xavier_uniform_(self.W)

    def forward(self, x, y):
        y = torch.clip(y, max=self.n_classes - 1)
        cos = F.linear(F.normalize(x), F.normalize(self.W))
        bounded = torch.clamp(cos, min=-1, max=1)
        theta = bounded.arccos()
        hot = F.one_hot(y, self.n_classes).bool()
        logits = torch.where(hot, torch.cos(theta + self.m), cos)
        return F.cross_entropy(self.s * logits, y)


class CosFace(ArcFace):
    def forward(self, x, y):
        cos = F.linear(F.normalize(x), F.normalize(self.W))
        return F.cross_entropy(self.s * (cos - self.m * F.one_hot(y, self.n_classes)), y)


class ArcMargin(ArcFace):
    """The usual form without acos: cos(a + m) = cos a cos m - sin a sin m."""

    def forward(self, x, y):
        cos = F.linear(F.normalize(x), F.normalize(self.W))
        sin = torch.sqrt((1.0 - cos.pow(2)).clamp(min=1e-7))
        phi = cos * math.cos(self.m) - sin * math.sin(self.m)
        return F.cross_entropy(self.s * torch.where(F.one_hot(y, self.n_classes).bool(), phi, cos), y)


def magnitude_regulariser(x, lo=10.0, hi=110.0):
    n = (x * x).sum(dim=1) ** 0.5
    n = n.clamp(lo, hi)
    return (n / hi ** 2 + 1.0 / n).mean()


def centre(x):
    return (x - x.mean(0)) / torch.sqrt(x.var(0, unbiased=False) + 1e-5)
