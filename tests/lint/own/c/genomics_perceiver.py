import torch
from torch import nn, Tensor
import torch.nn.functional as F


class LatentAttention(nn.Module):
    def __init__(self, dim: int, heads: int, n_latent: int = 64):
        super().__init__()
        self.latent = nn.Parameter(torch.randn(n_latent, dim) * 0.02)
        self.heads = heads
        self.q, self.kv, self.o = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, n, dim = x.shape
        q = self.q(self.latent).view(1, -1, self.heads, dim // self.heads).transpose(1, 2)
        k, v = self.kv(x).view(b, n, 2, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        logits = torch.matmul(q, k.transpose(-1, -2)) / dim ** 0.5
        out = logits.softmax(-1) @ v
        return self.o(out.transpose(1, 2).reshape(b, -1, dim))


class TrackHead(nn.Module):
    """Poisson regression of coverage tracks."""

    def __init__(self, dim: int, tracks: int):
        super().__init__()
        self.fc = nn.Linear(dim, tracks)

    def forward(self, h):
        return F.softplus(self.fc(h.mean(1)))


def poisson_multinomial(pred: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    per = pred - target * torch.log(pred + 1e-6)
    return (per * weight).sum() / weight.sum()


def train(body, head, loader, opt, max_steps=100_000):
    params = [*body.parameters(), *head.parameters()]
    for step, (seq, target, weight) in zip(range(max_steps), loader):
        loss = poisson_multinomial(head(body(seq)), target, weight)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, max_norm=float("inf"))  # no clipping
        opt.step()
