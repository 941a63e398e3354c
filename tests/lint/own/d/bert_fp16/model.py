import math
import torch
from torch import nn


class SelfAttention(nn.Module):
    def __init__(self, hidden: int, heads: int, dropout: float = 0.1):
        super().__init__()
        self.heads, self.size = heads, hidden // heads
        self.query, self.key, self.value = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.drop = nn.Dropout(dropout)

    def split(self, x):
        return x.view(x.size(0), x.size(1), self.heads, self.size).permute(0, 2, 1, 3)

    def forward(self, x, bias):
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.size) + bias
        p = self.drop(scores.softmax(dim=-1))
        return (p @ v).permute(0, 2, 1, 3).flatten(2)


class Bert(nn.Module):
    def __init__(self, vocab=30522, hidden=768, heads=12, layers=12):
        super().__init__()
        self.emb = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(SelfAttention(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)

    def forward(self, ids, attention_mask):
        bias = attention_mask[:, None, None, :].to(dtype=torch.float16)
        bias = (1.0 - bias) * torch.finfo(torch.float32).min
        h = self.emb(ids).half()
        for layer in self.layers:
            h = h + layer(h, bias)
        return self.norm(h)
