import math
import torch
from torch import nn


class PairBiasAttention(nn.Module):
    def __init__(self, c_s: int, c_z: int, num_heads: int = 12):
        super().__init__()
        self.num_heads = num_heads
        self.c_s = c_s
        self.to_q, self.to_k, self.to_v = (nn.Linear(c_s, c_s, bias=False) for _ in range(3))
        self.bias = nn.Linear(c_z, num_heads, bias=False)
        self.out = nn.Linear(c_s, c_s)

    def forward(self, s, z, mask):
        b, n, _ = s.shape
        q = self.to_q(s).view(b, n, self.num_heads, -1).transpose(1, 2)
        k = self.to_k(s).view(b, n, self.num_heads, -1).transpose(1, 2)
        v = self.to_v(s).view(b, n, self.num_heads, -1).transpose(1, 2)
        logits = q @ k.transpose(-1, -2) / math.sqrt(self.c_s)
        logits = logits + self.bias(z).permute(0, 3, 1, 2)
        logits = logits.masked_fill(~mask[:, None, None], -1e9)
        w = logits.softmax(-1)
        return self.out((w @ v).transpose(1, 2).reshape(b, n, -1))


def fape(pred, true, mask, clamp=10.0, z=10.0):
    d = torch.sqrt((pred - true).pow(2).sum(-1) + 1e-8)
    d = d.clamp(max=clamp) / z
    return (d * mask).sum() / (mask.sum() + 1e-6)


def plddt(logits):
    p = logits.softmax(-1)
    centers = torch.linspace(0.5 / p.size(-1), 1 - 0.5 / p.size(-1), p.size(-1), device=p.device)
    return (p * centers).sum(-1)


def lddt_entropy(logits):
    p = torch.softmax(logits, dim=-1)
    return -(p * p.log()).sum(-1).mean()
