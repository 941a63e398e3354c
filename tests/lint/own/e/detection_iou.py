import torch
from torch import Tensor


def box_area(b: Tensor) -> Tensor:
    return (b[:, 2] - b[:, 0]).clamp(min=0) * (b[:, 3] - b[:, 1]).clamp(min=0)


def iou(a: Tensor, b: Tensor, eps: float = 1e-7) -> Tensor:
    lt = torch.max(a[:, :2], b[:, :2])
    rb = torch.min(a[:, 2:], b[:, 2:])
    wh = (rb - lt).clamp(min=0)
    inter = wh[:, 0] * wh[:, 1]
    return inter / (box_area(a) + box_area(b) - inter + eps)


def giou_loss(a: Tensor, b: Tensor, eps: float = 1e-7) -> Tensor:
    i = iou(a, b)
    lt = torch.min(a[:, :2], b[:, :2])
    rb = torch.max(a[:, 2:], b[:, 2:])
    hull = (rb - lt).clamp(min=0).prod(-1)
    union = (box_area(a) + box_area(b)) / (1 + i)
    return 1 - i + (hull - union) / (hull + eps)


def decode(delta: Tensor, anchors: Tensor) -> Tensor:
    size = anchors[:, 2:] - anchors[:, :2]
    ctr = anchors[:, :2] + 0.5 * size
    c = ctr + delta[:, :2] * size
    s = size * torch.exp(delta[:, 2:])
    return torch.cat([c - 0.5 * s, c + 0.5 * s], -1)


def box_loss(delta: Tensor, anchors: Tensor, gt: Tensor, fg: Tensor) -> Tensor:
    per = giou_loss(decode(delta, anchors), gt)
    return (per * fg).sum() / fg.sum()
