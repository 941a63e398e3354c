import math

import torch
from torch import nn

F32_MIN = torch.finfo(torch.float32).min


class CrossAttention(nn.Module):
    def __init__(self, dim, ctx_dim, n_heads=8):
        super().__init__()
        self.n_heads = n_heads
        self.d_head = dim // n_heads
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_k = nn.Linear(ctx_dim, dim, bias=False)
        self.to_v = nn.Linear(ctx_dim, dim, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def split(self, t):
        return t.unflatten(-1, (self.n_heads, self.d_head)).transpose(1, 2)

    def forward(self, x, ctx, ctx_mask):
        q, k, v = self.split(self.to_q(x)), self.split(self.to_k(ctx)), self.split(self.to_v(ctx))
        sim = q @ k.transpose(-2, -1) / math.sqrt(self.d_head)
        sim = sim.half().masked_fill(ctx_mask[:, None, None, :].logical_not(), F32_MIN)
        out = sim.softmax(dim=-1).to(v.dtype) @ v
        return self.to_out(out.transpose(1, 2).flatten(2))


def causal_bias16(t: int, device) -> torch.Tensor:
    bias = torch.full((t, t), -1e9, dtype=torch.float16, device=device)
    return torch.triu(bias, diagonal=1)


def causal_bias(t: int, dtype: torch.dtype, device) -> torch.Tensor:
    bias = torch.full((t, t), torch.finfo(dtype).min, dtype=dtype, device=device)
    return torch.triu(bias, diagonal=1)


def pad_bias(pad: torch.Tensor) -> torch.Tensor:
    return pad.to(torch.bfloat16)[:, None, None, :] * -1e9
