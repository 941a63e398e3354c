import math
import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, d: int):
        super().__init__()
        self.g = nn.Parameter(torch.ones(d))

    def forward(self, x):
        x = x.to(torch.float16)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-8) * self.g


class Attention(nn.Module):
    def __init__(self, d: int, heads: int):
        super().__init__()
        self.heads, self.hd = heads, d // heads
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.o = nn.Linear(d, d, bias=False)

    def forward(self, x, keep):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, self.hd).permute(2, 0, 3, 1, 4)
        s = q @ k.transpose(-1, -2) / math.sqrt(self.hd)
        s = s.masked_fill(~keep[:, None, None, :], torch.finfo(torch.float32).min)
        w = F.softmax(s, dim=-1)
        return self.o((w @ v).transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.n1, self.n2 = RMSNorm(d), RMSNorm(d)
        self.att = Attention(d, heads)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.SiLU(), nn.Linear(4 * d, d))

    def forward(self, x, keep):
        x = x + self.att(self.n1(x), keep)
        return x + self.mlp(self.n2(x))


@torch.inference_mode()
def encode(emb, blocks, ids, pad_id=0):
    emb, blocks = emb.half().cuda(), [b.half().cuda() for b in blocks]
    ids = ids.cuda()
    x = emb(ids)
    for b in blocks:
        x = b(x, ids != pad_id)
    return x
