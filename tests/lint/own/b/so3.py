import torch
from torch import Tensor


def hat(v: Tensor) -> Tensor:
    x, y, z = v.unbind(-1)
    o = torch.zeros_like(x)
    return torch.stack([o, -z, y, z, o, -x, -y, x, o], -1).view(*v.shape[:-1], 3, 3)


def exp_map(w: Tensor) -> Tensor:
    theta2 = w.pow(2).sum(-1)[..., None, None]
    theta = (theta2 + 1e-12).sqrt()
    K = hat(w)
    return torch.eye(3, device=w.device) + torch.sin(theta) / theta * K + (1 - torch.cos(theta)) / (theta2 + 1e-12) * K @ K


def log_map(R: Tensor) -> Tensor:
    cos = (R.diagonal(dim1=-2, dim2=-1).sum(-1) - 1) * 0.5
    theta = torch.acos(cos.clamp(-1, 1))
    factor = torch.where(theta < 1e-4, torch.full_like(theta, 0.5), theta / (2 * torch.sin(theta)))
    skew = R - R.transpose(-1, -2)
    return factor[..., None] * torch.stack([skew[..., 2, 1], skew[..., 0, 2], skew[..., 1, 0]], -1)


def refine(points: Tensor, obs: Tensor, K: Tensor, iters: int = 200, lr: float = 1e-2):
    w = torch.full((3,), 1e-3, requires_grad=True)
    t = torch.zeros(3, requires_grad=True)
    opt = torch.optim.Adam([w, t], lr=lr)
    for _ in range(iters):
        cam = points @ exp_map(w).T + t
        uv = cam @ K.T
        uv = uv[:, :2] / uv[:, 2:].clamp(min=1e-3)
        loss = torch.nn.functional.huber_loss(uv, obs)
        opt.zero_grad()
        loss.backward()
        opt.step()
    return exp_map(w).detach(), t.detach()
