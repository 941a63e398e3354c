import torch
from torch import nn
import torch.nn.functional as F


class NeRF(nn.Module):
    def __init__(self, d_in=63, width=256):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(d_in, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.sigma = nn.Linear(width, 1)
        self.rgb = nn.Linear(width, 3)

    def forward(self, x):
        h = self.trunk(x)
        return F.relu(self.sigma(h)), torch.sigmoid(self.rgb(h))


def render(sigma, rgb, z):
    delta = torch.cat([z[:, 1:] - z[:, :-1], torch.full_like(z[:, :1], 1e10)], -1)
    alpha = 1.0 - torch.exp(-sigma.squeeze(-1) * delta)
    trans = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1.0 - alpha + 1e-10], -1), -1)[:, :-1]
    weights = alpha * trans
    color = (weights.unsqueeze(-1) * rgb).sum(1)
    depth = (weights * z).sum(1) / weights.sum(1)
    return color, depth


def psnr(mse):
    return -10.0 * torch.log10(mse.clamp(min=1e-10))


def step(net, pts, z, target, gt_depth, opt):
    sigma, rgb = net(pts)
    color, depth = render(sigma, rgb, z)
    mse = F.mse_loss(color, target)
    loss = mse + 0.1 * F.smooth_l1_loss(depth, gt_depth)
    opt.zero_grad()
    loss.backward()
    opt.step()
    return psnr(mse.detach()).item()
