import torch
import torch.nn as nn
import torch.nn.functional as F


def silog(pred, gt, lam=0.85):
    valid = gt > 1e-3
    d = torch.log(pred[valid]) - torch.log(gt[valid])
    return torch.sqrt((d ** 2).mean() - lam * d.mean() ** 2 + 1e-7) * 10.0


def smoothness(disp, img):
    mean = disp.mean((2, 3), keepdim=True)
    disp = disp / (mean + 1e-7)
    dx = (disp[..., :, :-1] - disp[..., :, 1:]).abs()
    dy = (disp[..., :-1, :] - disp[..., 1:, :]).abs()
    wx = torch.exp(-(img[..., :, :-1] - img[..., :, 1:]).abs().mean(1, keepdim=True))
    wy = torch.exp(-(img[..., :-1, :] - img[..., 1:, :]).abs().mean(1, keepdim=True))
    return (dx * wx).mean() + (dy * wy).mean()


class DepthNet(nn.Module):
    def __init__(self, encoder, ch):
        super().__init__()
        self.encoder = encoder
        self.up = nn.Sequential(nn.Conv2d(ch, 64, 3, padding=1), nn.ELU(), nn.Upsample(scale_factor=4), nn.Conv2d(64, 1, 3, padding=1))

    def forward(self, x):
        return F.relu(self.up(self.encoder(x)))


def train_epoch(net, loader, opt):
    for img, gt in loader:
        img, gt = img.cuda(), gt.cuda()
        pred = net(img)
        loss = silog(pred, gt) + 0.1 * smoothness(pred, img)
        loss = torch.nan_to_num(loss, nan=0.0, posinf=0.0)
        opt.zero_grad()
        loss.backward()
        opt.step()
