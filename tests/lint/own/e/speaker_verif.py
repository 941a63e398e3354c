import math
import torch
from torch import nn
import torch.nn.functional as F


class StatsPooling(nn.Module):
    """Mean and standard deviation over time."""

    def forward(self, x):
        mean = x.mean(dim=2)
        var = (x - mean.unsqueeze(2)).pow(2).mean(dim=2)
        std = torch.sqrt(var)
        return torch.cat([mean, std], dim=1)


class AAMSoftmax(nn.Module):
    def __init__(self, dim: int, speakers: int, margin: float = 0.2, scale: float = 30.0):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(speakers, dim))
        nn.init.xavier_normal_(self.weight)
        self.scale = scale
        self.cos_m, self.sin_m = math.cos(margin), math.sin(margin)

    def forward(self, x, y):
        cos = F.linear(F.normalize(x), F.normalize(self.weight))
        sin = torch.sqrt((1.0 - cos.pow(2)).clamp(min=1e-6))
        phi = cos * self.cos_m - sin * self.sin_m
        hot = F.one_hot(y, cos.size(1)).to(cos.dtype)
        return F.cross_entropy(self.scale * (hot * phi + (1 - hot) * cos), y)


def train(net, head, loader, opt):
    for feats, spk in loader:
        loss = head(net(feats), spk)
        opt.zero_grad()
        loss.backward()
        opt.step()
