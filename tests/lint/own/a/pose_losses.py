import torch
import torch.nn.functional as F
from torch import Tensor


def safe_acos(x: Tensor) -> Tensor:
    return torch.acos(torch.clip(x, min=-1.0, max=1.0))


def quat_to_axis_angle(q: Tensor) -> Tensor:
    q = q / q.norm(p=2, dim=-1, keepdim=True)
    half = safe_acos(q[..., :1])
    s = torch.sin(half)
    axis = torch.where(s.abs() > 1e-6, q[..., 1:] / s, torch.zeros_like(q[..., 1:]))
    return 2 * half * axis


def quat_to_axis_angle_stable(q: Tensor) -> Tensor:
    q = F.normalize(q, dim=-1)
    n = q[..., 1:].norm(dim=-1, keepdim=True)
    ang = 2 * torch.atan2(n, q[..., :1])
    small = n < 1e-6
    n_safe = torch.where(small, torch.ones_like(n), n)
    return torch.where(small, 2 * q[..., 1:], ang * q[..., 1:] / n_safe)


def elevation(v: Tensor) -> Tensor:
    v = F.normalize(v, dim=-1)
    return v[..., 2].clamp_(-1, 1).asin()


def bone_lengths(joints: Tensor, parents: list) -> Tensor:
    d = joints[:, 1:] - joints[:, parents]
    return d.square().sum(-1).add(1e-10).sqrt()


@torch.no_grad()
def angular_error_deg(R: Tensor, R_gt: Tensor) -> Tensor:
    tr = torch.einsum("bij,bij->b", R, R_gt)
    return torch.rad2deg(torch.acos(((tr - 1) / 2).clamp(-1, 1)))


def mpjpe(pred: Tensor, gt: Tensor) -> Tensor:
    return torch.linalg.vector_norm(pred - gt, dim=-1).mean()
