import math
import torch
from torch import nn
import torch.nn.functional as F


class Field(nn.Module):
    def __init__(self, enc, width=128):
        super().__init__()
        self.enc = enc
        self.trunk = nn.Sequential(nn.Linear(enc.dim, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.sigma, self.rgb = nn.Linear(width, 1), nn.Linear(width, 3)

    def forward(self, pts):
        h = self.trunk(self.enc(pts))
        density = torch.exp(self.sigma(h)).squeeze(-1)
        return density, torch.sigmoid(self.rgb(h))


def composite(density, rgb, z):
    delta = torch.cat([z[..., 1:] - z[..., :-1], torch.full_like(z[..., :1], 1e10)], -1)
    alpha = 1.0 - torch.exp(-F.relu(density) * delta)
    trans = torch.cumprod(torch.cat([torch.ones_like(alpha[..., :1]), 1.0 - alpha + 1e-10], -1), -1)[..., :-1]
    w = alpha * trans
    color = (w.unsqueeze(-1) * rgb).sum(-2)
    depth = (w * z).sum(-1) / w.sum(-1)
    return color, depth, w


def psnr(mse: float) -> float:
    return -10.0 * math.log10(max(mse, 1e-10))


def step(field, rays_o, rays_d, gt, opt, near=2.0, far=6.0, n=64):
    z = torch.linspace(near, far, n, device=rays_o.device).expand(rays_o.size(0), n)
    pts = rays_o[:, None] + z[..., None] * F.normalize(rays_d, dim=-1)[:, None]
    color, depth, _ = composite(*field(pts), z)
    loss = F.mse_loss(color, gt) + 1e-3 * depth.var(unbiased=False)
    opt.zero_grad()
    loss.backward()
    opt.step()
    return psnr(loss.item())
