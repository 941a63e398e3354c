import torch
import torch.nn.functional as F
from torch import nn, Tensor


def band(n: int, w: int, device) -> Tensor:
    i = torch.arange(n, device=device)
    return (i[:, None] - i[None]).abs() <= w


class WindowAttention(nn.Module):
    """Local attention: every token sees itself and w neighbours on each side."""

    def __init__(self, dim: int, heads: int = 8, w: int = 128):
        super().__init__()
        self.heads, self.w, self.hd = heads, w, dim // heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, pad: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, self.hd).permute(2, 0, 3, 1, 4)
        s = q @ k.transpose(-1, -2) * self.hd ** -0.5
        keep = band(n, self.w, x.device) & ~pad[:, None, None, :]
        s = s.masked_fill(~keep, torch.finfo(s.dtype).min)
        w = F.softmax(s.float(), dim=-1).type_as(v)
        return self.out((w @ v).transpose(1, 2).reshape(b, n, d))


class PooledClassifier(nn.Module):
    def __init__(self, vocab: int, dim: int, classes: int):
        super().__init__()
        self.emb, self.att, self.fc = nn.Embedding(vocab, dim), WindowAttention(dim), nn.Linear(dim, classes)

    def forward(self, ids: Tensor, pad: Tensor) -> Tensor:
        h = self.emb(ids)
        h = h + self.att(h, pad)
        m = (~pad).unsqueeze(-1).type_as(h)
        return self.fc((h * m).sum(1) / m.sum(1).clamp(min=1.0))


def step(model, batch, opt, sched):
    ids, y = batch
    if (y == -100).all():
        return None
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(ids, ids == 0).float(), y, ignore_index=-100)
    opt.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    sched.step()
    return loss.item()
