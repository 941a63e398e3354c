import torch
from torch import nn, Tensor


class PoincareEmbedding(nn.Module):
    def __init__(self, n: int, d: int, c: float = 1.0):
        super().__init__()
        self.c = c
        self.emb = nn.Embedding(n, d)
        nn.init.uniform_(self.emb.weight, -1e-3, 1e-3)

    def project(self, x: Tensor, eps: float = 1e-5) -> Tensor:
        n = x.norm(dim=-1, keepdim=True).clamp(min=1e-15)
        cap = (1 - eps) / self.c ** 0.5
        return torch.where(n > cap, x / n * cap, x)

    def dist(self, u: Tensor, v: Tensor) -> Tensor:
        d2 = (u - v).pow(2).sum(-1)
        den = (1 - u.pow(2).sum(-1)).clamp(min=1e-5) * (1 - v.pow(2).sum(-1)).clamp(min=1e-5)
        z = (1 + 2 * d2 / den).clamp(min=1 + 1e-7)
        return torch.acosh(z)

    def forward(self, i: Tensor, j: Tensor) -> Tensor:
        return self.dist(self.project(self.emb(i)), self.project(self.emb(j)))


def fermi_dirac(d: Tensor, r: float = 2.0, t: float = 1.0) -> Tensor:
    return torch.sigmoid((r - d) / t)


def train(model, pairs, negs, steps=1000):
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(steps):
        pos = model(pairs[:, 0], pairs[:, 1])
        neg = model(pairs[:, 0].repeat_interleave(negs.size(1)), negs.flatten()).view(len(pairs), -1)
        loss = nn.functional.cross_entropy(-torch.cat([pos[:, None], neg], 1), torch.zeros(len(pairs), dtype=torch.long))
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
