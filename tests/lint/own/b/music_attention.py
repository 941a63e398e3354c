import math
import torch
import torch.nn.functional as F
from torch import nn


class RelativeAttention(nn.Module):
    def __init__(self, d_model: int, n_heads: int, max_len: int = 2048):
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_model // n_heads
        self.scale = 1.0 / math.sqrt(d_model)
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)
        self.er = nn.Parameter(torch.randn(max_len, self.d_head) * 0.02)
        self.register_buffer("future", torch.triu(torch.ones(max_len, max_len, dtype=torch.bool), 1))

    def skew(self, rel):
        b, h, t, _ = rel.shape
        return F.pad(rel, (1, 0)).reshape(b, h, t + 1, t)[:, :, 1:]

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.n_heads, self.d_head).permute(2, 0, 3, 1, 4)
        rel = self.skew(q @ self.er[-t:].t())
        s = (q @ k.transpose(-1, -2) + rel) * self.scale
        s = s.masked_fill(self.future[:t, :t], float("-inf"))
        return self.proj((s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))


class MusicLM(nn.Module):
    def __init__(self, vocab: int, d: int = 512, heads: int = 8, depth: int = 6):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.blocks = nn.ModuleList(RelativeAttention(d, heads) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(depth))
        self.embed_scale = math.sqrt(d)

    def forward(self, ids):
        x = self.emb(ids) * self.embed_scale
        for att, norm in zip(self.blocks, self.norms):
            x = x + att(norm(x))
        return x @ self.emb.weight.t()
