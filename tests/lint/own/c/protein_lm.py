import math

import torch
import torch.nn.functional as F
from torch import nn


class RotaryAttention(nn.Module):
    def __init__(self, embed_dim: int, num_heads: int):
        super().__init__()
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.head_dim = embed_dim // num_heads
        self.scaling = self.head_dim ** -0.5
        self.qkv, self.out = nn.Linear(embed_dim, 3 * embed_dim), nn.Linear(embed_dim, embed_dim)

    def forward(self, x, cos, sin, pad):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        rot = lambda z: torch.cat([-z[..., self.head_dim // 2:], z[..., :self.head_dim // 2]], -1)
        q, k = q * cos + rot(q) * sin, k * cos + rot(k) * sin
        att = (q * self.scaling) @ k.transpose(-1, -2)
        att = att.masked_fill(pad[:, None, None], torch.finfo(att.dtype).min)
        w = att.float().softmax(-1).to(v.dtype)
        return self.out((w @ v).transpose(1, 2).reshape(b, t, -1))


class PosEmbed(nn.Module):
    def __init__(self, n: int, embed_dim: int):
        super().__init__()
        self.emb = nn.Embedding(n, embed_dim)
        self.scale = math.sqrt(embed_dim)

    def forward(self, x):
        pos = torch.arange(x.size(1), device=x.device).clamp(max=self.emb.num_embeddings - 1)
        return x * self.scale + self.emb(pos)


def mlm_loss(logits, ids, masked):
    target = ids.masked_fill(~masked, -100)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), target.flatten(), ignore_index=-100, reduction="sum")
    return loss / masked.sum().clamp(min=1)


@torch.no_grad()
def pseudo_perplexity(logits, ids, pad):
    lp = F.log_softmax(logits.float(), -1).gather(-1, ids[..., None]).squeeze(-1)
    nll = -(lp * ~pad).sum(-1) / (~pad).sum(-1).clamp(min=1)
    return nll.clamp(max=50).exp()
