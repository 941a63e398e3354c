import math
import torch
from torch import nn, Tensor


class Detect(nn.Module):
    def __init__(self, nc: int, anchors: Tensor, ch: int):
        super().__init__()
        self.nc, self.na = nc, len(anchors)
        self.register_buffer("anchors", anchors.float())
        self.m = nn.Conv2d(ch, self.na * (nc + 5), 1)

    def forward(self, x: Tensor, grid: Tensor, stride: int) -> Tensor:
        b, _, h, w = x.shape
        y = self.m(x).view(b, self.na, self.nc + 5, h, w).permute(0, 1, 3, 4, 2)
        xy = (y[..., :2].sigmoid() + grid) * stride
        wh = y[..., 2:4].exp() * self.anchors.view(1, -1, 1, 1, 2)
        return torch.cat([xy, wh, y[..., 4:]], -1)


def box_iou(a: Tensor, b: Tensor, eps: float = 1e-7) -> Tensor:
    lt, rb = torch.max(a[:, :2], b[:, :2]), torch.min(a[:, 2:], b[:, 2:])
    inter = (rb - lt).clamp(min=0).prod(-1)
    area = (a[:, 2:] - a[:, :2]).prod(-1) + (b[:, 2:] - b[:, :2]).prod(-1)
    return inter / (area - inter + eps)


def ciou_aspect(wp: Tensor, hp: Tensor, wt: Tensor, ht: Tensor) -> Tensor:
    return (4 / math.pi ** 2) * (torch.atan(wt / (ht + 1e-7)) - torch.atan(wp / (hp + 1e-7))).pow(2)


def objectness(pred: Tensor, obj: Tensor, pos: Tensor) -> Tensor:
    bce = nn.functional.binary_cross_entropy_with_logits(pred, obj, reduction="none")
    return bce.sum() / pos.sum()
