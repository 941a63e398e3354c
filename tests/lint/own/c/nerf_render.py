import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Field(nn.Module):
    def __init__(self, d: int = 63, w: int = 256):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(d, w), nn.ReLU(), nn.Linear(w, w), nn.ReLU())
        self.sigma, self.rgb = nn.Linear(w, 1), nn.Linear(w, 3)

    def forward(self, x):
        h = self.body(x)
        return F.softplus(self.sigma(h) - 1).squeeze(-1), torch.sigmoid(self.rgb(h))


def render(sigma: Tensor, rgb: Tensor, z: Tensor, dirs: Tensor):
    dz = torch.cat([z[..., 1:] - z[..., :-1], torch.full_like(z[..., :1], 1e10)], -1)
    dz = dz * dirs.norm(dim=-1, keepdim=True)
    alpha = 1.0 - torch.exp(-sigma * dz)
    trans = torch.cumprod(torch.cat([torch.ones_like(alpha[..., :1]), 1.0 - alpha + 1e-10], -1), -1)[..., :-1]
    w = alpha * trans
    acc = w.sum(-1)
    depth = (w * z).sum(-1) / acc.clamp(min=1e-6)
    return (w[..., None] * rgb).sum(-2), depth, acc


def sample_pdf(bins: Tensor, weights: Tensor, n: int) -> Tensor:
    weights = weights + 1e-5
    pdf = weights / weights.sum(-1, keepdim=True)
    cdf = torch.cat([torch.zeros_like(pdf[..., :1]), pdf.cumsum(-1)], -1)
    u = torch.rand(*cdf.shape[:-1], n, device=bins.device)
    i = torch.searchsorted(cdf, u, right=True).clamp(1, cdf.size(-1) - 1)
    lo, hi = cdf.gather(-1, i - 1), cdf.gather(-1, i)
    span = hi - lo
    span = torch.where(span < 1e-5, torch.ones_like(span), span)
    b0, b1 = bins.gather(-1, i - 1), bins.gather(-1, i)
    return b0 + (u - lo) / span * (b1 - b0)


def psnr(mse: float) -> float:
    return float(-10.0 * torch.log10(torch.tensor(max(mse, 1e-10))))


def rays(h, w, focal, c2w):
    j, i = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    d = torch.stack([(i - w / 2) / focal, -(j - h / 2) / focal, -torch.ones_like(i)], -1)
    return F.normalize((d[..., None, :] * c2w[:3, :3]).sum(-1), dim=-1)
