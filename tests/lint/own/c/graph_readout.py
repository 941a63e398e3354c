import torch
import torch.nn.functional as F
from torch import nn


class Readout(nn.Module):
    """Padded graphs; a virtual node at index 0 is always present."""

    def __init__(self, d: int, heads: int = 4):
        super().__init__()
        self.d, self.heads = d, heads
        self.dh = d // heads
        self.q = nn.Parameter(torch.zeros(heads, self.dh).normal_(std=0.02))
        self.kv = nn.Linear(d, 2 * d)

    def forward(self, h, valid):
        b, n, _ = h.shape
        valid = valid.clone()
        valid[:, 0] = True
        k, v = self.kv(h).view(b, n, 2, self.heads, self.dh).permute(2, 0, 3, 1, 4)
        s = torch.einsum("hd,bhnd->bhn", self.q, k) * self.dh ** -0.5
        s = s.masked_fill(~valid[:, None], float("-inf"))
        return torch.einsum("bhn,bhnd->bhd", s.softmax(-1), v).flatten(1)


class LocalAttention(nn.Module):
    def __init__(self, d: int, window: int):
        super().__init__()
        self.qkv, self.window = nn.Linear(d, 3 * d), window

    def forward(self, x):
        n = x.size(1)
        q, k, v = self.qkv(x).chunk(3, -1)
        i = torch.arange(n, device=x.device)
        far = (i[:, None] - i[None]).abs() > self.window
        s = (q @ k.mT / q.size(-1) ** 0.5).masked_fill(far, float("-inf"))
        return s.softmax(-1) @ v


def masked_pool(h, valid):
    m = valid.unsqueeze(-1).to(h.dtype)
    mean = (h * m).sum(1) / m.sum(1).clamp(min=1)
    top = h.masked_fill(~valid.unsqueeze(-1), float("-inf")).amax(1)
    return torch.cat([mean, top.clamp(min=-1e4)], -1)


def sdpa(q, k, v, valid):
    bias = torch.zeros(valid.shape, dtype=q.dtype, device=q.device).masked_fill(~valid, torch.finfo(q.dtype).min)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias[:, None, None])
