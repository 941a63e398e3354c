import torch
from torch import Tensor, nn
import torch.nn.functional as F


def quat_normalise(q: Tensor) -> Tensor:
    return q / torch.norm(q, dim=-1, keepdim=True)


def quat_mul(a: Tensor, b: Tensor) -> Tensor:
    w1, x1, y1, z1 = a.unbind(-1)
    w2, x2, y2, z2 = b.unbind(-1)
    return torch.stack([
        w1 * w2 - x1 * x2 - y1 * y2 - z1 * z2,
        w1 * x2 + x1 * w2 + y1 * z2 - z1 * y2,
        w1 * y2 - x1 * z2 + y1 * w2 + z1 * x2,
        w1 * z2 + x1 * y2 - y1 * x2 + z1 * w2,
    ], -1)


def rotation_error(pred: Tensor, gt: Tensor) -> Tensor:
    dot = (quat_normalise(pred) * gt).sum(-1).abs()
    return 2 * torch.acos(torch.clamp(dot, max=1.0))


def rodrigues(v: Tensor) -> Tensor:
    theta = v.norm(dim=-1, keepdim=True)
    half = 0.5 * theta
    k = torch.where(theta < 1e-6, torch.full_like(theta, 0.5), torch.sin(half) / theta)
    return torch.cat([torch.cos(half), k * v], -1)


class PoseLoss(nn.Module):
    def __init__(self, beta: float = 10.0):
        super().__init__()
        self.beta = beta

    def forward(self, t, v, gt_t, gt_q, init_q):
        q = quat_mul(rodrigues(v), init_q)
        return F.smooth_l1_loss(t, gt_t) + self.beta * rotation_error(q, gt_q).mean()
