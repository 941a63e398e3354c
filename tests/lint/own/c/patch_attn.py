import torch
import torch.nn as nn
import torch.nn.functional as F


class MaskedPatchAttention(nn.Module):
    def __init__(self, dim, num_heads=8, attn_drop=0.0):
        super().__init__()
        self.num_heads = num_heads
        head_dim = dim // num_heads
        self.scale = head_dim ** -0.5
        self.qkv = nn.Linear(dim, dim * 3, bias=False)
        self.proj = nn.Linear(dim, dim)
        self.drop = nn.Dropout(attn_drop)

    def forward(self, x, keep):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = (q @ k.transpose(-2, -1)) * self.scale
        attn = attn.masked_fill(keep[:, None, None] == 0, float("-inf"))
        if torch.all(torch.isinf(attn)):
            return x
        attn = self.drop(F.softmax(attn, dim=-1))
        return self.proj((attn @ v).transpose(1, 2).reshape(B, N, C))


class Block(nn.Module):
    def __init__(self, dim, heads, ratio=4.0):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.att = MaskedPatchAttention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, int(dim * ratio)), nn.GELU(), nn.Linear(int(dim * ratio), dim))
        self.ls = nn.Parameter(1e-5 * torch.ones(dim))

    def forward(self, x, keep):
        x = x + self.ls * self.att(self.n1(x), keep)
        return x + self.ls * self.mlp(self.n2(x))


def all_background(mask: torch.Tensor) -> bool:
    return bool((mask == 0).all())
