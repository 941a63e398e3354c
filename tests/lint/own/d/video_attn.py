import torch
from torch import nn
import torch.nn.functional as F


class TemporalAttention(nn.Module):
    def __init__(self, dim: int, heads: int = 8):
        super().__init__()
        self.dim, self.heads = dim, heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, self.dim // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, scale=1.0 / self.dim ** 0.5)
        return self.proj(y.transpose(1, 2).reshape(b, t, -1))


class FramePool(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.w = nn.Linear(dim, 1)

    def forward(self, x, missing):
        s = self.w(x).squeeze(-1)
        s[missing] = float("-inf")
        if s.max() == float("-inf"):
            return x.mean(1)
        return (s.softmax(1).unsqueeze(-1) * x).sum(1)


class Clip(nn.Module):
    def __init__(self, backbone, dim, classes):
        super().__init__()
        self.backbone = backbone
        self.att, self.pool, self.head = TemporalAttention(dim), FramePool(dim), nn.Linear(dim, classes)

    def forward(self, video, missing):
        b, t = video.shape[:2]
        f = self.backbone(video.flatten(0, 1)).view(b, t, -1)
        return self.head(self.pool(f + self.att(f), missing))
