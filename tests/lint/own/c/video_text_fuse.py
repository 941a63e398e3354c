import math

import torch
from torch import nn, Tensor


class Fuse(nn.Module):
    def __init__(self, d_model: int, nhead: int):
        super().__init__()
        self.nhead, self.d_model = nhead, d_model
        self.q, self.k, self.v = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)

    def split(self, t: Tensor) -> Tensor:
        return t.unflatten(-1, (self.nhead, self.d_model // self.nhead)).transpose(1, 2)

    def forward(self, frames: Tensor, words: Tensor, word_pad: Tensor) -> Tensor:
        q, k, v = self.split(self.q(frames)), self.split(self.k(words)), self.split(self.v(words))
        scores = q @ k.mT / math.sqrt(self.d_model)
        bias = torch.zeros_like(word_pad, dtype=scores.dtype).masked_fill(word_pad, -math.inf)
        scores = scores + bias[:, None, None, :]
        if bool(torch.isneginf(scores).all()):
            return frames
        ctx = scores.softmax(-1) @ v
        return frames + ctx.transpose(1, 2).flatten(2)


class SelfFuse(nn.Module):
    def __init__(self, d_model: int, nhead: int):
        super().__init__()
        self.att = nn.MultiheadAttention(d_model, nhead, batch_first=True)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x: Tensor, pad: Tensor) -> Tensor:
        empty = pad.all(dim=1)
        pad = pad.clone()
        pad[empty, 0] = False
        h, _ = self.att(x, x, x, key_padding_mask=pad)
        return self.norm(x + h.masked_fill(empty[:, None, None], 0.0))
