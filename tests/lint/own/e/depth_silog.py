import torch
from torch import nn, Tensor
import torch.nn.functional as F


def silog(pred: Tensor, gt: Tensor, lam: float = 0.85) -> Tensor:
    mask = gt > 1e-3
    g = torch.log(pred[mask].clamp(min=1e-3)) - torch.log(gt[mask])
    return torch.sqrt(g.pow(2).mean() - lam * g.mean() ** 2) * 10.0


def edge_smooth(disp: Tensor, img: Tensor) -> Tensor:
    dx = (disp[..., :, 1:] - disp[..., :, :-1]).abs()
    dy = (disp[..., 1:, :] - disp[..., :-1, :]).abs()
    ix = (img[..., :, 1:] - img[..., :, :-1]).abs().mean(1, keepdim=True)
    iy = (img[..., 1:, :] - img[..., :-1, :]).abs().mean(1, keepdim=True)
    return (dx * torch.exp(-ix)).mean() + (dy * torch.exp(-iy)).mean()


def mean_normalised(disp: Tensor) -> Tensor:
    return disp / (disp.mean((2, 3), keepdim=True) + 1e-7)


class DepthHead(nn.Module):
    def __init__(self, c: int, max_depth: float = 80.0):
        super().__init__()
        self.conv = nn.Conv2d(c, 1, 3, padding=1)
        self.max_depth = max_depth

    def forward(self, f):
        return torch.sigmoid(self.conv(f)) * self.max_depth


def train(net, head, loader, opt):
    for img, gt in loader:
        d = head(net(img))
        loss = silog(d, gt) + 1e-3 * edge_smooth(mean_normalised(d), img)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), float("inf"))
        opt.step()
