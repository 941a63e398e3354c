import torch
import torch.nn as nn
import torch.nn.functional as F


class Patch3D(nn.Module):
    def __init__(self, c_in, dim, p=(2, 4, 4)):
        super().__init__()
        self.proj = nn.Conv3d(c_in, dim, kernel_size=p, stride=p)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x):
        x = self.proj(x)
        b, c, d, h, w = x.shape
        return self.norm(x.flatten(2).transpose(1, 2)), (d, h, w)


class VolumeNet(nn.Module):
    def __init__(self, c_in=1, dim=96, n_cls=14, depth=4):
        super().__init__()
        self.patch = Patch3D(c_in, dim)
        layer = nn.TransformerEncoderLayer(dim, 6, 4 * dim, batch_first=True, norm_first=True, activation="gelu")
        self.body = nn.TransformerEncoder(layer, depth)
        self.head = nn.Conv3d(dim, n_cls, 1)

    def forward(self, vol):
        tok, (d, h, w) = self.patch(vol)
        tok = self.body(tok)
        feat = tok.transpose(1, 2).reshape(vol.size(0), -1, d, h, w)
        feat = torch.nan_to_num(feat, nan=0.0, posinf=1e4, neginf=-1e4)
        return F.interpolate(self.head(feat), size=vol.shape[2:], mode="trilinear", align_corners=False)


def dice(logits, onehot, eps=1e-5):
    p = logits.softmax(1)
    dims = (2, 3, 4)
    inter = (p * onehot).sum(dims)
    union = p.sum(dims) + onehot.sum(dims)
    return 1 - ((2 * inter + eps) / (union + eps)).mean()


def hu_window(ct, lo=-175.0, hi=250.0):
    return ((ct.clamp(lo, hi) - lo) / (hi - lo)).nan_to_num()


def mr_zscore(vol):
    brain = vol[vol > 0]
    return (vol - brain.mean()) / brain.std()
