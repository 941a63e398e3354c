from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, einsum, nn


class SlotMemory(nn.Module):
    """Cross attention from a bank of learned slots to the tokens."""

    def __init__(self, dim: int, n_slots: int = 16, heads: int = 8, eps: float = 1e-6):
        super().__init__()
        self.heads = heads
        self.eps = eps
        self.scale = dim ** -0.5
        bank = torch.empty(1, n_slots, dim)
        self.slots = nn.Parameter(bank)
        self.register_parameter("gate", nn.Parameter(torch.zeros(dim)))
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_kv = nn.Linear(dim, dim * 2, bias=False)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        slots = self.slots.expand(x.shape[0], -1, -1)
        q = self.to_q(self.norm(slots))
        k, v = self.to_kv(x).chunk(2, dim=-1)
        q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=self.heads) for t in (q, k, v))
        dots = einsum("b h i d, b h j d -> b h i j", q, k) * self.scale
        attn = dots.softmax(dim=-2) + self.eps
        attn = attn / attn.sum(dim=-1, keepdim=True)
        out = einsum("b h i j, b h j d -> b h i d", attn, v)
        out = rearrange(out, "b h n d -> b n (h d)")
        return slots + torch.tanh(self.gate) * out
