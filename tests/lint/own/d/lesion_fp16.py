import torch
from torch import nn
import torch.nn.functional as F


def tversky16(logits: torch.Tensor, y: torch.Tensor, alpha: float = 0.7) -> torch.Tensor:
    p = torch.sigmoid(logits).to(torch.float16)
    y = y.to(torch.float16)
    tp = (p * y).flatten(1).sum(1)
    fp = (p * (1 - y)).flatten(1).sum(1)
    fn = ((1 - p) * y).flatten(1).sum(1)
    return (1 - tp / (tp + alpha * fn + (1 - alpha) * fp + 1e-8)).mean()


def focal_tversky(logits: torch.Tensor, y: torch.Tensor, gamma: float = 0.75) -> torch.Tensor:
    p = logits.float().sigmoid()
    tp = (p * y).flatten(1).sum(1)
    rest = 0.7 * ((1 - p) * y).flatten(1).sum(1) + 0.3 * (p * (1 - y)).flatten(1).sum(1)
    ti = (tp + 1.0) / (tp + rest + 1.0)
    return torch.pow(1 - ti, 0.75).mean()


class DeepSupervision(nn.Module):
    def __init__(self, weights=(1.0, 0.5, 0.25)):
        super().__init__()
        self.weights = weights

    def forward(self, outs, y):
        total = 0.0
        for w, o in zip(self.weights, outs):
            t = F.interpolate(y, size=o.shape[2:], mode="nearest")
            prob = torch.sigmoid(o)
            total = total + w * F.binary_cross_entropy(prob.float(), t)
        return total / sum(self.weights)
