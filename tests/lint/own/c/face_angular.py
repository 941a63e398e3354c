import math

import torch
import torch.nn.functional as F
from torch import nn


class AdditiveAngular(nn.Module):
    def __init__(self, d: int, n: int, s: float = 30.0, m: float = 0.4):
        super().__init__()
        self.w = nn.Parameter(torch.Tensor(n, d))
        nn.init.kaiming_normal_(self.w)
        self.s, self.m = s, m
        self.cos_m, self.sin_m = math.cos(m), math.sin(m)
        self.th, self.mm = math.cos(math.pi - m), math.sin(math.pi - m) * m

    def forward(self, x, y):
        cos = F.linear(F.normalize(x), F.normalize(self.w))
        sin = torch.sqrt((1.0 - cos.pow(2)).clamp(min=1e-7))
        phi = cos * self.cos_m - sin * self.sin_m
        phi = torch.where(cos > self.th, phi, cos - self.mm)
        onehot = F.one_hot(y, self.w.size(0)).to(cos.dtype)
        return self.s * (onehot * phi + (1.0 - onehot) * cos)


def angle(a, b, eps=1e-6):
    cos = F.cosine_similarity(a, b).clamp(-1 + eps, 1 - eps)
    return torch.rad2deg(torch.acos(cos))


@torch.no_grad()
def tar_at_far(scores, same, far=1e-3):
    neg = scores[~same].sort(descending=True).values
    thr = neg[min(int(far * len(neg)), len(neg) - 1)]
    return (scores[same] > thr).float().mean().item()


def train_step(net, head, img, ids, opt, max_norm=5.0):
    opt.zero_grad()
    loss = F.cross_entropy(head(net(img), ids), ids)
    loss.backward()
    norm = nn.utils.clip_grad_norm_([*net.parameters(), *head.parameters()], max_norm, norm_type=float("inf"))
    opt.step()
    return loss.item(), norm.item()
