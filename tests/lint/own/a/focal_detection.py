from dataclasses import dataclass, field

import torch
from torch import nn
import torch.nn.functional as F


@dataclass
class TrainCfg:
    lr: float = 1e-4
    max_norm: float = 1e6
    milestones: list = field(default_factory=lambda: [24, 33])


class SoftmaxFocal(nn.Module):
    def __init__(self, gamma: float = 2.0, alpha: float = 0.25):
        super().__init__()
        self.gamma, self.alpha = gamma, alpha
        self.softmax = nn.Softmax(dim=1)

    def forward(self, logits, y):
        log_pt = torch.log(self.softmax(logits)).gather(1, y[:, None]).squeeze(1)
        pt = log_pt.exp()
        loss = -self.alpha * (1 - pt) ** self.gamma * log_pt
        return loss.mean().clamp_(max=5.0)


class SigmoidFocal(nn.Module):
    def forward(self, logits, y, gamma=2.0):
        ce = F.binary_cross_entropy_with_logits(logits, y, reduction="none")
        p = torch.sigmoid(logits)
        pt = p * y + (1 - p) * (1 - y)
        return (ce * (1 - pt) ** gamma).sum() / max(1, int(y.sum()))


def giou_loss(a, b):
    lt, rb = torch.max(a[:, :2], b[:, :2]), torch.min(a[:, 2:], b[:, 2:])
    inter = (rb - lt).clamp(min=0).prod(1)
    area = lambda x: (x[:, 2:] - x[:, :2]).clamp(min=0).prod(1)
    union = area(a) + area(b) - inter
    hull = (torch.max(a[:, 2:], b[:, 2:]) - torch.min(a[:, :2], b[:, :2])).clamp(min=0).prod(1)
    iou = inter / (union + 1e-7)
    return (1 - iou + (hull - union) / (hull + 1e-7)).mean()


def decode_wh(t, anchor_wh, max_ratio=4.135):
    return anchor_wh * t.clamp(max=max_ratio).exp()


def train_one(net, batch, opt, cfg: TrainCfg):
    img, boxes, y = batch
    cls, pred = net(img)
    loss = SoftmaxFocal()(cls, y) + giou_loss(pred, boxes)
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), max_norm=cfg.max_norm)
    opt.step()
    return loss.item()
