import torch
from torch import nn
import torch.nn.functional as F


class SILog(nn.Module):
    """Scale-invariant log loss (Eigen et al.)."""

    def __init__(self, lam: float = 0.85):
        super().__init__()
        self.lam = lam

    def forward(self, pred, gt, mask):
        g = torch.log(pred[mask]) - torch.log(gt[mask])
        dg = g.pow(2).mean() - self.lam * g.mean().pow(2)
        return 10 * torch.sqrt(dg)


class SILogStable(SILog):
    def __init__(self, lam: float = 0.85, eps: float = 1e-6):
        super().__init__(lam)
        self.eps = eps

    def forward(self, pred, gt, mask):
        g = torch.log(pred[mask].clamp(min=self.eps)) - torch.log(gt[mask].clamp(min=self.eps))
        dg = g.pow(2).mean() - self.lam * g.mean().pow(2)
        return 10 * torch.sqrt(dg.clamp(min=self.eps))


def edge_aware_smoothness(disp, img):
    d = disp / (disp.mean((2, 3), keepdim=True) + 1e-7)
    gx = (d[..., 1:] - d[..., :-1]).abs()
    wx = torch.exp(-(img[..., 1:] - img[..., :-1]).abs().mean(1, keepdim=True))
    return (gx * wx).mean()


def disp_to_depth(disp, lo=0.1, hi=100.0):
    return 1.0 / (1.0 / hi + (1.0 / lo - 1.0 / hi) * torch.sigmoid(disp))


@torch.no_grad()
def abs_rel(pred, gt, mask):
    p, g = pred[mask], gt[mask]
    return ((p - g).abs() / g.clamp(min=1e-3)).mean().item()
