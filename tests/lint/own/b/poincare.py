import torch
from torch import nn, Tensor

MAX_NORM = 1 - 1e-5


def artanh(x: Tensor) -> Tensor:
    return 0.5 * torch.log((1 + x) / (1 - x))


def project(x: Tensor) -> Tensor:
    n = x.norm(dim=-1, keepdim=True)
    return torch.where(n > MAX_NORM, x / n * MAX_NORM, x)


def mobius_add(x: Tensor, y: Tensor) -> Tensor:
    xy = (x * y).sum(-1, keepdim=True)
    x2, y2 = x.pow(2).sum(-1, keepdim=True), y.pow(2).sum(-1, keepdim=True)
    num = (1 + 2 * xy + y2) * x + (1 - x2) * y
    return num / (1 + 2 * xy + x2 * y2).clamp(min=1e-15)


def distance(x: Tensor, y: Tensor) -> Tensor:
    return 2 * artanh(mobius_add(-x, y).norm(dim=-1))


class PoincareEmbedding(nn.Module):
    def __init__(self, n: int, dim: int = 10):
        super().__init__()
        self.w = nn.Parameter(torch.empty(n, dim).uniform_(-1e-3, 1e-3))

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return -distance(project(self.w[u]).unsqueeze(1), project(self.w[v]))


def train(emb: PoincareEmbedding, pairs, n_neg: int = 10, lr: float = 0.1):
    opt = torch.optim.SGD(emb.parameters(), lr=lr)
    for u, v in pairs:
        neg = torch.randint(len(emb.w), (len(u), n_neg))
        s = emb(u, torch.cat([v[:, None], neg], 1))
        loss = nn.functional.cross_entropy(s, torch.zeros(len(u), dtype=torch.long))
        opt.zero_grad()
        loss.backward()
        opt.step()
