import torch
import torch.nn.functional as F
from torch import Tensor


def focal(logits: Tensor, target: Tensor, alpha: float = 0.25, gamma: float = 2.0) -> Tensor:
    p = torch.sigmoid(logits)
    pos = -alpha * target * (1 - p).pow(gamma) * torch.log(p)
    neg = -(1 - alpha) * (1 - target) * p.pow(gamma) * torch.log(1 - p)
    num_pos = (target > 0).sum()
    return (pos + neg).sum() / num_pos


def focal_with_logits(logits: Tensor, target: Tensor, gamma: float = 2.0) -> Tensor:
    ce = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    pt = torch.exp(-ce)
    return ((1 - pt) ** gamma * ce).mean()


def box_residuals(boxes: Tensor, anchors: Tensor) -> Tensor:
    diag = anchors[:, 3:5].norm(dim=1).clamp(min=1e-3)
    xyz = (boxes[:, :3] - anchors[:, :3]) / diag[:, None]
    lwh = torch.log(boxes[:, 3:6].clamp(min=1e-3)) - torch.log(anchors[:, 3:6].clamp(min=1e-3))
    yaw = (boxes[:, 6] - anchors[:, 6]).sin()
    return torch.cat([xyz, lwh, yaw[:, None]], 1)


def box_loss(pred: Tensor, boxes: Tensor, anchors: Tensor, pos: Tensor) -> Tensor:
    per = F.smooth_l1_loss(pred, box_residuals(boxes, anchors), reduction="none", beta=1 / 9).sum(1)
    return (per * pos).sum() / max(int(pos.sum()), 1)
