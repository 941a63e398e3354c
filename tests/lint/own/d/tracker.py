import torch
from torch import nn, Tensor
import torch.nn.functional as F


def generalized_iou(a: Tensor, b: Tensor, eps: float = 1e-7) -> Tensor:
    lt, rb = torch.max(a[..., :2], b[..., :2]), torch.min(a[..., 2:], b[..., 2:])
    inter = (rb - lt).clamp(min=0).prod(-1)
    union = (a[..., 2:] - a[..., :2]).prod(-1) + (b[..., 2:] - b[..., :2]).prod(-1) - inter
    hull = (torch.max(a[..., 2:], b[..., 2:]) - torch.min(a[..., :2], b[..., :2])).clamp(min=0).prod(-1)
    return inter / (union + eps) - (hull - union) / (hull + eps)


def sigmoid_focal(logits: Tensor, y: Tensor, num_boxes: float, alpha=0.25, gamma=2.0) -> Tensor:
    p = logits.sigmoid()
    ce = F.binary_cross_entropy_with_logits(logits, y, reduction="none")
    pt = p * y + (1 - p) * (1 - y)
    w = (alpha * y + (1 - alpha) * (1 - y)) * (1 - pt) ** gamma
    return (w * ce).mean(1).sum() / max(num_boxes, 1.0)


def inverse_sigmoid(x: Tensor, eps: float = 1e-5) -> Tensor:
    x = x.clamp(0, 1)
    return torch.log(x.clamp(min=eps) / (1 - x).clamp(min=eps))


class Refine(nn.Module):
    def __init__(self, d: int, layers: int = 6):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(d, 4) for _ in range(layers))

    def forward(self, hs: Tensor, ref: Tensor) -> Tensor:
        for h, head in zip(hs, self.heads):
            ref = torch.sigmoid(head(h) + inverse_sigmoid(ref)).detach()
        return torch.sigmoid(self.heads[-1](hs[-1]) + inverse_sigmoid(ref))


class Motion:
    def __init__(self, q: float = 1e-2, r: float = 1e-1):
        self.q, self.r = q, r

    def update(self, x, P, z):
        P = P + self.q
        k = P / (P + self.r)
        return x + k * (z - x), (1 - k) * P
