import torch
from torch import nn
import torch.nn.functional as F


class AttentionGate(nn.Module):
    def __init__(self, c: int):
        super().__init__()
        self.wx, self.wg = nn.Conv2d(c, c // 2, 1), nn.Conv2d(c, c // 2, 1)
        self.psi = nn.Conv2d(c // 2, 1, 1)

    def forward(self, x, g):
        a = torch.sigmoid(self.psi(F.relu(self.wx(x) + self.wg(g))))
        return x * a


def tversky(logits, y, alpha=0.3, beta=0.7):
    p = logits.sigmoid().flatten(1)
    y = y.flatten(1)
    tp = (p * y).sum(1)
    fp = (p * (1 - y)).sum(1)
    fn = ((1 - p) * y).sum(1)
    return (tp + 1.0) / (tp + alpha * fp + beta * fn + 1.0)


def focal_tversky(logits, y, gamma=0.75):
    return (1 - tversky(logits, y)).pow(0.75).mean()


def vessel_ce(logits, y, n_classes=3):
    y = y.clamp(0, n_classes - 1)
    return F.cross_entropy(logits, y)


def train_step(net, img, mask, label, opt):
    seg, cls = net(img)
    loss = focal_tversky(seg, mask) + vessel_ce(cls, label)
    opt.zero_grad()
    loss.backward()
    opt.step()
    return loss.item()
