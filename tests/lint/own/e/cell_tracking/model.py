import torch
from torch import nn
import torch.nn.functional as F


class Matcher(nn.Module):
    """Cross attention between detections of two frames."""

    def __init__(self, dim: int, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.scale = dim ** -0.5
        self.to_q = nn.Linear(dim, dim)
        self.to_kv = nn.Linear(dim, 2 * dim)
        self.out = nn.Linear(dim, dim)
        self.shift = nn.Linear(dim, 2)

    def forward(self, a, b, b_mask):
        n, i, d = a.shape
        q = self.to_q(a).view(n, i, self.heads, d // self.heads).transpose(1, 2)
        k, v = self.to_kv(b).chunk(2, -1)
        k = k.view(n, -1, self.heads, d // self.heads).transpose(1, 2)
        v = v.view(n, -1, self.heads, d // self.heads).transpose(1, 2)
        dots = q @ k.transpose(-1, -2) * self.scale
        dots = dots.masked_fill(~b_mask[:, None, None, :], float("-inf"))
        attn = F.softmax(dots, dim=-1)
        h = self.out((attn @ v).transpose(1, 2).reshape(n, i, d))
        return h, self.shift(h)


def motion_weight(dx: torch.Tensor) -> torch.Tensor:
    speed = dx.norm(dim=-1)
    return torch.where(speed > 0, 1.0 / speed, torch.zeros_like(speed))
