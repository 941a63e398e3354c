import torch
import torch.nn as nn
import torch.nn.functional as F


class GeneralisedCE(nn.Module):
    """(1 - p_y^q) / q, Zhang and Sabuncu 2018."""

    def __init__(self, q=0.7):
        super().__init__()
        self.q = q

    def forward(self, logits, y):
        p = F.softmax(logits, dim=1).gather(1, y[:, None]).squeeze(1)
        return ((1 - p ** self.q) / self.q).mean()


class SymmetricCE(nn.Module):
    def __init__(self, alpha=0.1, beta=1.0, n=10):
        super().__init__()
        self.alpha, self.beta, self.n = alpha, beta, n

    def forward(self, logits, y):
        p = F.softmax(logits, 1).clamp(min=1e-7, max=1.0)
        onehot = F.one_hot(y, self.n).float().clamp(min=1e-4)
        rce = -(p * onehot.log()).sum(1).mean()
        return self.alpha * F.cross_entropy(logits, y) + self.beta * rce


def co_teach(l1, l2, remember: float):
    k = max(1, int(remember * len(l1)))
    i1, i2 = l1.detach().argsort()[:k], l2.detach().argsort()[:k]
    return l1[i2].mean(), l2[i1].mean()


def confident_loss(logits, soft, thresh=0.95):
    conf, pseudo = soft.max(1)
    keep = (conf > thresh).float()
    ce = F.cross_entropy(logits, pseudo, reduction="none")
    return (ce * keep).sum() / keep.sum()


def rampup(epoch, length=30):
    t = min(max(epoch / length, 0.0), 1.0)
    return float(torch.exp(torch.tensor(-5.0 * (1.0 - t) ** 2)))
