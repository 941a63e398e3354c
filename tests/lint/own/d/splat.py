import torch
from torch import nn, Tensor
import torch.nn.functional as F


class Gaussians(nn.Module):
    def __init__(self, xyz: Tensor):
        super().__init__()
        n = xyz.size(0)
        self.xyz = nn.Parameter(xyz)
        self.raw_scale = nn.Parameter(torch.full((n, 3), -4.0))
        self.quat = nn.Parameter(torch.tensor([1.0, 0, 0, 0]).repeat(n, 1))
        self.raw_op = nn.Parameter(torch.full((n, 1), -2.0))
        self.rgb = nn.Parameter(torch.rand(n, 3))

    @property
    def scale(self) -> Tensor:
        return self.raw_scale.clamp(-10.0, 2.0).exp()

    def rotation(self) -> Tensor:
        w, x, y, z = F.normalize(self.quat, dim=-1).unbind(-1)
        return torch.stack([
            1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y),
            2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x),
            2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y),
        ], -1).view(-1, 3, 3)

    def cov(self) -> Tensor:
        m = self.rotation() * self.scale.unsqueeze(1)
        return m @ m.transpose(1, 2)


def blend(alpha: Tensor, rgb: Tensor) -> Tensor:
    alpha = alpha.clamp(max=0.99)
    t = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha], 1), 1)[:, :-1]
    return ((alpha * t).unsqueeze(-1) * rgb).sum(1)


def project(p: Tensor, K: Tensor, near: float = 0.2) -> Tensor:
    z = p[..., 2:].clamp(min=near)
    return (p / z) @ K.t()


def ssim_l1(ssim, a, b, lam=0.2):
    return (1 - lam) * F.l1_loss(a, b) + lam * (1 - ssim(a, b))


def inverse_sigmoid(x: float) -> float:
    t = torch.tensor(x).clamp(1e-4, 1 - 1e-4)
    return torch.log(t / (1 - t)).item()
