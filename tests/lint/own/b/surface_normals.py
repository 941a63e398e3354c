import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class NormalHead(nn.Module):
    def __init__(self, c: int):
        super().__init__()
        self.conv = nn.Conv2d(c, 3, 1)

    def forward(self, f):
        n = F.normalize(self.conv(f), dim=1, eps=1e-6)
        return torch.nan_to_num(n)


def angular_loss(pred, gt, valid):
    cos = (pred * gt).sum(1)
    ang = torch.acos(torch.clamp(cos, -1.0, 1.0))
    return (ang * valid).sum() / valid.sum()


def angular_errors(pred: np.ndarray, gt: np.ndarray) -> dict:
    cos = np.clip((pred * gt).sum(-1), -1.0, 1.0)
    deg = np.rad2deg(np.arccos(cos))
    return {"mean": deg.mean(), "median": np.median(deg), "11.25": (deg < 11.25).mean()}


def smoothness(depth, img):
    gx = (depth[..., 1:] - depth[..., :-1]).abs()
    wx = torch.exp(-(img[..., 1:] - img[..., :-1]).abs().mean(1, keepdim=True))
    return (gx * wx).mean()


def fit(backbone, head, loader, epochs=30):
    params = [*backbone.parameters(), *head.parameters()]
    opt = torch.optim.AdamW(params, lr=1e-4)
    with torch.autograd.set_detect_anomaly(True):
        for _ in range(epochs):
            for img, gt, valid in loader:
                loss = angular_loss(head(backbone(img)), gt, valid)
                opt.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(params, 1.0)
                opt.step()
