import math
import torch
from torch import nn
import torch.nn.functional as F


class ArcFace(nn.Module):
    def __init__(self, dim: int, classes: int, s: float = 64.0, m: float = 0.5):
        super().__init__()
        self.s, self.m = s, m
        self.weight = nn.Parameter(torch.FloatTensor(classes, dim))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, x, y):
        cos = F.linear(F.normalize(x), F.normalize(self.weight))
        theta = torch.acos(torch.clamp(cos, min=-1.0, max=1.0))
        hot = F.one_hot(y, cos.size(1)).to(cos.dtype)
        return self.s * torch.cos(theta + self.m * hot)


class CosFace(nn.Module):
    def __init__(self, dim, classes, s=64.0, m=0.35):
        super().__init__()
        self.s, self.m = s, m
        self.weight = nn.Parameter(torch.randn(classes, dim) / math.sqrt(dim))

    def forward(self, x, y):
        cos = F.linear(F.normalize(x), F.normalize(self.weight))
        return self.s * (cos - self.m * F.one_hot(y, cos.size(1)))


def train_epoch(backbone, head, loader, opt, scaler):
    for img, y in loader:
        img, y = img.cuda(), y.cuda()
        opt.zero_grad(set_to_none=True)
        with torch.cuda.amp.autocast():
            emb = backbone(img)
        loss = F.cross_entropy(head(emb.float(), y), y)
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(backbone.parameters(), max_norm=5)
        scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
