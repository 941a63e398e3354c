import math
import torch
from torch import Tensor


def area(b: Tensor) -> Tensor:
    return (b[:, 2] - b[:, 0]).clamp(min=0) * (b[:, 3] - b[:, 1]).clamp(min=0)


def giou(a: Tensor, b: Tensor, eps: float = 1e-7) -> Tensor:
    lt, rb = torch.max(a[:, :2], b[:, :2]), torch.min(a[:, 2:], b[:, 2:])
    wh = (rb - lt).clamp(min=0)
    inter = wh[:, 0] * wh[:, 1]
    union = area(a) + area(b) - inter
    iou = inter / (union + eps)
    hull = torch.cat([torch.min(a[:, :2], b[:, :2]), torch.max(a[:, 2:], b[:, 2:])], 1)
    c = area(hull)
    return iou - (c - union) / (c + eps)


def clip_to_image(boxes: Tensor, size: tuple[int, int]) -> Tensor:
    h, w = size
    x = boxes[:, 0::2].clamp(0, w - 1)
    y = boxes[:, 1::2].clamp(0, h - 1)
    return torch.stack([x, y], 2).flatten(1)


def decode(delta: Tensor, anchors: Tensor, clip: float = math.log(1000.0 / 16)) -> Tensor:
    wh = anchors[:, 2:] - anchors[:, :2]
    ctr = anchors[:, :2] + 0.5 * wh
    dxy, dwh = delta[:, :2], delta[:, 2:].clamp(max=clip)
    ctr = ctr + dxy * wh
    wh = wh * dwh.exp()
    return torch.cat([ctr - 0.5 * wh, ctr + 0.5 * wh], 1)


def smooth_l1(x: Tensor, beta: float = 1.0) -> Tensor:
    a = x.abs()
    return torch.where(a < beta, 0.5 * a * a / beta, a - 0.5 * beta).sum()


def loss(pred: Tensor, gt: Tensor, n_pos: int) -> Tensor:
    return (1 - giou(pred, gt)).sum() / max(n_pos, 1)
