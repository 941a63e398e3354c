import torch
from torch import nn


class WindowAttention(nn.Module):
    def __init__(self, dim: int, n_heads: int, window: int = 256):
        super().__init__()
        self.n_heads, self.window = n_heads, window
        self.dk = dim // n_heads
        self.wq, self.wk, self.wv = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.wo = nn.Linear(dim, dim)

    def band(self, n: int, device) -> torch.Tensor:
        i = torch.arange(n, device=device)
        return (i[:, None] - i[None]).abs() > self.window

    def forward(self, x, pad):
        b, n, d = x.shape
        q, k, v = (w(x).view(b, n, self.n_heads, self.dk).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        scores = q @ k.transpose(-1, -2) * self.dk ** -0.5
        bad = self.band(n, x.device) | pad[:, None, None, :]
        scores = scores.masked_fill(bad, torch.finfo(torch.float32).min)
        out = torch.softmax(scores, dim=-1) @ v
        return self.wo(out.transpose(1, 2).reshape(b, n, d))


class Encoder(nn.Module):
    def __init__(self, vocab, dim=512, depth=6):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(WindowAttention(dim, 8) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(depth))

    def forward(self, ids, pad):
        h = self.emb(ids)
        for att, norm in zip(self.layers, self.norms):
            h = h + att(norm(h), pad)
        keep = (~pad).unsqueeze(-1).to(h.dtype)
        return (h * keep).sum(1) / keep.sum(1)


def load_encoder(vocab: int, path: str):
    enc = Encoder(vocab)
    enc.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return enc.cuda().half().eval()
