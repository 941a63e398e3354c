import torch
from torch import nn
import torch.nn.functional as F


class NeRF(nn.Module):
    def __init__(self, d_in=63, width=256):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(d_in, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.sigma, self.rgb = nn.Linear(width, 1), nn.Linear(width, 3)

    def forward(self, x):
        h = self.trunk(x)
        return F.softplus(self.sigma(h) - 1.0), torch.sigmoid(self.rgb(h))


def composite(sigma, rgb, z):
    delta = torch.cat([z[..., 1:] - z[..., :-1], torch.full_like(z[..., :1], 1e10)], -1)
    alpha = 1.0 - torch.exp(-sigma.squeeze(-1) * delta)
    trans = torch.cumprod(torch.cat([torch.ones_like(alpha[..., :1]), 1.0 - alpha + 1e-10], -1), -1)[..., :-1]
    w = alpha * trans
    return (w[..., None] * rgb).sum(-2), w


def sample_pdf(bins, weights, n):
    weights = weights + 1e-5
    pdf = weights / weights.sum(-1, keepdim=True)
    cdf = torch.cumsum(pdf, -1)
    u = torch.rand(*cdf.shape[:-1], n, device=cdf.device)
    idx = torch.searchsorted(cdf.detach(), u, right=True).clamp(max=bins.size(-1) - 1)
    return torch.gather(bins, -1, idx)


def psnr(mse: torch.Tensor) -> float:
    return -10.0 * torch.log10(mse.detach().clamp(min=1e-10)).item()


def step(net, embed, rays, z, target, opt):
    sigma, rgb = net(embed(rays))
    pred, _ = composite(sigma, rgb, z)
    loss = F.mse_loss(pred, target)
    opt.zero_grad()
    loss.backward()
    opt.step()
    return psnr(loss)
