import torch
from torch import Tensor, nn


class HalfFocal(nn.Module):
    """Runs in the fp16 graph of the detector, so no upcast."""

    def __init__(self, gamma: float = 2.0, alpha: float = 0.25):
        super().__init__()
        self.gamma, self.alpha = gamma, alpha

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        p = torch.sigmoid(logits.half())
        p = p.clamp(1e-7, 1 - 1e-7)
        pos = -self.alpha * (1 - p) ** self.gamma * torch.log(p)
        neg = -(1 - self.alpha) * p ** self.gamma * torch.log(1 - p)
        return (target * pos + (1 - target) * neg).sum() / target.sum().clamp(min=1.0)


class Focal(nn.Module):
    def __init__(self, gamma: float = 2.0, alpha: float = 0.25):
        super().__init__()
        self.gamma, self.alpha = gamma, alpha

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        ce = nn.functional.binary_cross_entropy_with_logits(logits, target, reduction="none")
        p = logits.sigmoid()
        pt = p * target + (1 - p) * (1 - target)
        at = self.alpha * target + (1 - self.alpha) * (1 - target)
        return (at * (1 - pt) ** self.gamma * ce).sum() / target.sum().clamp(min=1.0)
