import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class ViTConfig:
    n_embd: int = 768
    n_head: int = 12
    dropout: float = 0.0


class Attention(nn.Module):
    def __init__(self, cfg: ViTConfig):
        super().__init__()
        self.cfg = cfg
        self.qkv = nn.Linear(cfg.n_embd, 3 * cfg.n_embd)
        self.proj = nn.Linear(cfg.n_embd, cfg.n_embd)

    def heads(self, x):
        B, N, _ = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return [t.view(B, N, self.cfg.n_head, -1).transpose(1, 2) for t in (q, k, v)]

    def forward(self, x):
        q, k, v = self.heads(x)
        att = torch.matmul(q, k.mT) / math.sqrt(self.cfg.n_embd)
        return self.proj((att.softmax(-1) @ v).transpose(1, 2).flatten(2))


class FusedAttention(Attention):
    def forward(self, x):
        C = x.shape[-1]
        q, k, v = self.heads(x)
        y = F.scaled_dot_product_attention(q, k, v, scale=1.0 / math.sqrt(C))
        return self.proj(y.transpose(1, 2).flatten(2))


class RightAttention(Attention):
    def forward(self, x):
        q, k, v = self.heads(x)
        q = q * (self.cfg.n_embd // self.cfg.n_head) ** -0.5
        return self.proj(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))


class SingleHeadPool(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.scale = dim ** -0.5
        self.query = nn.Parameter(torch.zeros(dim))
        self.k = nn.Linear(dim, dim)

    def forward(self, x):
        w = (self.k(x) @ self.query * self.scale).softmax(-1)
        return (w.unsqueeze(-1) * x).sum(1)


class TokenEmbedding(nn.Module):
    def __init__(self, vocab, d_model):
        super().__init__()
        self.emb, self.d_model = nn.Embedding(vocab, d_model), d_model

    def forward(self, ids):
        return self.emb(ids) * math.sqrt(self.d_model)
