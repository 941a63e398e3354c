import math
import torch
from torch import nn
import torch.nn.functional as F


class RelativeAttention(nn.Module):
    def __init__(self, d_model: int, n_heads: int, max_len: int = 2048):
        super().__init__()
        self.d_model, self.n_heads = d_model, n_heads
        self.d_head = d_model // n_heads
        self.wq, self.wk, self.wv = (nn.Linear(d_model, d_model) for _ in range(3))
        self.er = nn.Parameter(torch.randn(max_len, self.d_head) * 0.02)
        self.register_buffer("causal", torch.ones(max_len, max_len).tril().bool())

    def split(self, x):
        b, t, _ = x.shape
        return x.view(b, t, self.n_heads, self.d_head).transpose(1, 2)

    def skew(self, x):
        b, h, t, _ = x.shape
        x = F.pad(x, (1, 0)).view(b, h, t + 1, t)
        return x[:, :, 1:]

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.split(self.wq(x)), self.split(self.wk(x)), self.split(self.wv(x))
        rel = self.skew(q @ self.er[-t:].t())
        scores = (q @ k.transpose(-2, -1) + rel) / math.sqrt(self.d_model)
        scores = scores.masked_fill(~self.causal[:t, :t], float("-inf"))
        out = F.softmax(scores, dim=-1) @ v
        return out.transpose(1, 2).reshape(b, t, -1)


def sample_next(logits, temperature=1.0):
    u = torch.rand_like(logits)
    g = -torch.log(-torch.log(u))
    return (logits / temperature + g).argmax(-1)
