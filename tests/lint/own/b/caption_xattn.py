import torch
from torch import nn
import torch.nn.functional as F


class CrossAttention(nn.Module):
    def __init__(self, dim: int, heads: int = 8):
        super().__init__()
        self.dim, self.heads = dim, heads
        self.to_q, self.to_kv, self.to_out = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)

    def split(self, t):
        return t.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x, regions, region_mask):
        q = self.split(self.to_q(x))
        k, v = map(self.split, self.to_kv(regions).chunk(2, -1))
        sim = torch.einsum("bhid,bhjd->bhij", q, k) * self.dim ** -0.5
        sim = sim.masked_fill(~region_mask[:, None, None, :], -torch.inf)
        att = sim.softmax(dim=-1)
        return self.to_out((att @ v).transpose(1, 2).flatten(2))


class CaptionHead(nn.Module):
    def __init__(self, dim: int, vocab: int, pad: int = 0):
        super().__init__()
        self.xatt, self.norm = CrossAttention(dim), nn.LayerNorm(dim)
        self.out = nn.Linear(dim, vocab)
        self.pad = pad

    def forward(self, x, regions, region_mask):
        return self.out(self.norm(x + self.xatt(x, regions, region_mask)))

    def loss(self, x, regions, region_mask, words):
        logits = self(x, regions, region_mask)
        return F.cross_entropy(logits.flatten(0, 1), words.flatten(), ignore_index=self.pad)


@torch.no_grad()
def coverage(att, words, pad=0):
    keep = (words != pad).float()
    return (att.amax(-1) * keep).sum(-1) / keep.sum(-1).clamp(min=1.0)
