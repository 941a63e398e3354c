import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class ArcMargin(nn.Module):
    def __init__(self, dim: int, n_ids: int, s: float = 64.0, m: float = 0.5):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_ids, dim))
        nn.init.xavier_uniform_(self.weight)
        self.s, self.m = s, m

    def forward(self, emb, ids):
        cosine = F.linear(F.normalize(emb), F.normalize(self.weight)).clamp(-1, 1)
        theta = torch.acos(cosine)
        onehot = F.one_hot(ids, self.weight.size(0)).bool()
        logits = torch.where(onehot, torch.cos(theta + self.m), cosine)
        return self.s * logits


class CosMargin(ArcMargin):
    def forward(self, emb, ids):
        cosine = F.linear(F.normalize(emb), F.normalize(self.weight))
        return self.s * (cosine - self.m * F.one_hot(ids, self.weight.size(0)))


@torch.no_grad()
def mean_angle(emb, centers, ids):
    cos = (F.normalize(emb) * F.normalize(centers[ids])).sum(-1).clamp(-1, 1)
    return math.degrees(torch.acos(cos).mean().item())


def resume(head, backbone, path):
    ck = torch.load(path, map_location="cpu", weights_only=False)
    backbone.load_state_dict(ck["backbone"])
    head.load_state_dict(ck["head"])
    return ck["epoch"] + 1
