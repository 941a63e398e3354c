from einops import rearrange
import torch
from torch import nn, einsum


class CrossAttention(nn.Module):
    def __init__(self, embed_dim, n_heads=12, ctx_dim=None):
        super().__init__()
        self.embed_dim = embed_dim
        self.n_heads = n_heads
        self.to_q = nn.Linear(embed_dim, embed_dim, bias=False)
        self.to_kv = nn.Linear(ctx_dim or embed_dim, 2 * embed_dim, bias=False)
        self.to_out = nn.Linear(embed_dim, embed_dim)

    def forward(self, x, ctx, ctx_keep=None):
        q = rearrange(self.to_q(x), "b n (h d) -> b h n d", h=self.n_heads)
        k, v = (rearrange(t, "b n (h d) -> b h n d", h=self.n_heads) for t in self.to_kv(ctx).chunk(2, -1))
        sim = einsum("bhid,bhjd->bhij", q, k) * self.embed_dim ** -0.5
        if ctx_keep is not None:
            sim = sim.masked_fill(~ctx_keep[:, None, None], float("-inf"))
        att = sim.softmax(dim=-1)
        return self.to_out(rearrange(att @ v, "b h n d -> b n (h d)"))


class QFormer(nn.Module):
    def __init__(self, n_query=32, dim=768, ctx_dim=1408, depth=6):
        super().__init__()
        self.query = nn.Parameter(torch.zeros(1, n_query, dim))
        nn.init.trunc_normal_(self.query, std=0.02)
        self.cross = nn.ModuleList(CrossAttention(dim, 12, ctx_dim) for _ in range(depth))
        self.ff = nn.ModuleList(nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)) for _ in range(depth))
        self.norm = nn.ModuleList(nn.LayerNorm(dim) for _ in range(depth))

    def forward(self, feats, keep):
        h = self.query.expand(feats.size(0), -1, -1)
        for att, ff, norm in zip(self.cross, self.ff, self.norm):
            h = h + att(norm(h), feats, keep)
            h = h + ff(h)
        return h
