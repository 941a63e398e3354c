import math

import torch
from torch import Tensor
from torchvision.ops import box_iou, generalized_box_iou_loss, sigmoid_focal_loss

CLIP = math.log(1000.0 / 16)


def encode(boxes: Tensor, anchors: Tensor) -> Tensor:
    aw, ah = (anchors[:, 2:] - anchors[:, :2]).clamp(min=1.0).unbind(1)
    gw, gh = (boxes[:, 2:] - boxes[:, :2]).clamp(min=1.0).unbind(1)
    ac = (anchors[:, :2] + anchors[:, 2:]) / 2
    gc = (boxes[:, :2] + boxes[:, 2:]) / 2
    d = (gc - ac) / torch.stack([aw, ah], 1)
    return torch.cat([d, torch.log(gw / aw)[:, None], torch.log(gh / ah)[:, None]], 1)


def decode(delta: Tensor, anchors: Tensor) -> Tensor:
    wh = (anchors[:, 2:] - anchors[:, :2])
    c = (anchors[:, :2] + anchors[:, 2:]) / 2 + delta[:, :2] * wh
    size = torch.exp(delta[:, 2:].clamp(max=CLIP)) * wh
    return torch.cat([c - size / 2, c + size / 2], 1)


def match(anchors: Tensor, gt: Tensor, hi=0.5, lo=0.4) -> Tensor:
    if gt.numel() == 0:
        return torch.full((len(anchors),), -1, device=anchors.device)
    iou, idx = box_iou(gt, anchors).max(0)
    idx[iou < lo] = -1
    idx[(iou >= lo) & (iou < hi)] = -2
    return idx


def losses(cls: Tensor, delta: Tensor, anchors: Tensor, gt: Tensor, labels: Tensor):
    idx = match(anchors, gt)
    pos = idx >= 0
    n_pos = max(1, int(pos.sum()))
    onehot = torch.zeros_like(cls)
    onehot[pos, labels[idx[pos]]] = 1.0
    l_cls = sigmoid_focal_loss(cls[idx != -2], onehot[idx != -2], reduction="sum") / n_pos
    l_box = generalized_box_iou_loss(decode(delta[pos], anchors[pos]), gt[idx[pos]], reduction="sum") / n_pos
    return l_cls, l_box
