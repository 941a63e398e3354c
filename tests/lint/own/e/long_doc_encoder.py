import torch
from torch import nn
import torch.nn.functional as F


class ChunkAttention(nn.Module):
    """Attention over chunks; the [DOC] slot is always visible."""

    def __init__(self, d: int, heads: int = 8):
        super().__init__()
        assert d % heads == 0
        self.heads = heads
        self.doc = nn.Parameter(torch.zeros(1, 1, d))
        self.q, self.kv, self.o = nn.Linear(d, d), nn.Linear(d, 2 * d), nn.Linear(d, d)

    def forward(self, x, pad):
        b, t, d = x.shape
        mem = torch.cat([self.doc.expand(b, -1, -1), x], 1)
        pad = F.pad(pad, (1, 0), value=False)
        q = self.q(x).view(b, t, self.heads, -1).transpose(1, 2)
        k, v = self.kv(mem).view(b, t + 1, 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=~pad[:, None, None, :])
        return self.o(y.transpose(1, 2).reshape(b, t, d))


class DocClassifier(nn.Module):
    def __init__(self, encoder: nn.Module, d: int, classes: int):
        super().__init__()
        self.encoder, self.att = encoder, ChunkAttention(d)
        self.out = nn.Linear(d, classes)

    def forward(self, chunks, pad):
        h = self.encoder(chunks)
        h = h + self.att(h, pad)
        keep = (~pad).unsqueeze(-1).to(h.dtype)
        return self.out((h * keep).sum(1) / keep.sum(1).clamp(min=1))


def train(model, loader, opt, max_norm: float = 1.0):
    for step, (chunks, pad, y) in enumerate(loader):
        loss = F.cross_entropy(model(chunks, pad), y, label_smoothing=0.05)
        opt.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        if not torch.isfinite(norm):
            print(f"step {step}: gradient norm {norm.item()}, not stepping")
            continue
        opt.step()
