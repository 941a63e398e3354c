from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn


class WindowAttention(nn.Module):
    def __init__(self, dim: int, window: int, heads: int, qkv_bias: bool = True):
        super().__init__()
        self.heads, self.window = heads, window
        head_dim = dim // heads
        self.scale = head_dim ** -0.5
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.table = nn.Parameter(torch.empty((2 * window - 1) ** 2, heads))
        self.register_buffer("index", self._index(window), persistent=False)
        self._init()

    def _init(self):
        nn.init.trunc_normal_(self.table, std=0.02)

    @staticmethod
    def _index(w: int) -> Tensor:
        c = torch.stack(torch.meshgrid(torch.arange(w), torch.arange(w), indexing="ij")).flatten(1)
        rel = (c[:, :, None] - c[:, None]).permute(1, 2, 0) + (w - 1)
        return rel[..., 0] * (2 * w - 1) + rel[..., 1]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = rearrange(self.qkv(x), "b n (t h d) -> t b h n d", t=3, h=self.heads)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        attn = attn + self.table[self.index].permute(2, 0, 1)
        if mask is not None:  # shifted windows: -100 between regions
            attn = attn.unflatten(0, (-1, mask.size(0))) + mask[None, :, None]
            attn = attn.flatten(0, 1)
        attn = F.softmax(attn.float(), dim=-1).type_as(v)
        return self.proj(rearrange(attn @ v, "b h n d -> b n (h d)"))


def shift_mask(h: int, w: int, win: int, shift: int) -> Tensor:
    img = torch.zeros(h, w)
    for i, a in enumerate((slice(0, -win), slice(-win, -shift), slice(-shift, None))):
        for j, b in enumerate((slice(0, -win), slice(-win, -shift), slice(-shift, None))):
            img[a, b] = 3 * i + j
    ids = rearrange(img, "(a x) (b y) -> (a b) (x y)", x=win, y=win)
    diff = ids[:, None] - ids[:, :, None]
    return diff.masked_fill(diff != 0, -100.0).masked_fill(diff == 0, 0.0)


class CosineWindow(WindowAttention):
    def forward(self, x, mask=None):
        q, k, v = rearrange(self.qkv(x), "b n (t h d) -> t b h n d", t=3, h=self.heads)
        attn = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT / 0.07
        return self.proj(rearrange(attn.softmax(-1) @ v, "b h n d -> b n (h d)"))
