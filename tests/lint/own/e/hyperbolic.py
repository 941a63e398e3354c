import torch
from torch import Tensor, nn

EPS = 1e-5


def project(x: Tensor, c: float = 1.0) -> Tensor:
    n = x.norm(dim=-1, keepdim=True).clamp(min=1e-15)
    limit = (1 - EPS) / c ** 0.5
    return torch.where(n > limit, x / n * limit, x)


def mobius_add(x: Tensor, y: Tensor) -> Tensor:
    x2, y2 = x.square().sum(-1, keepdim=True), y.square().sum(-1, keepdim=True)
    xy = (x * y).sum(-1, keepdim=True)
    num = (1 + 2 * xy + y2) * x + (1 - x2) * y
    return num / (1 + 2 * xy + x2 * y2).clamp(min=1e-15)


def dist(x: Tensor, y: Tensor) -> Tensor:
    n = mobius_add(-x, y).norm(dim=-1).clamp(max=1 - EPS)
    return 2 * torch.atanh(n)


class PoincareEmbedding(nn.Module):
    def __init__(self, n: int, d: int):
        super().__init__()
        self.w = nn.Parameter(torch.empty(n, d))
        nn.init.uniform_(self.w, -1e-3, 1e-3)

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return dist(project(self.w[u]), project(self.w[v]))


def loss_fn(model: PoincareEmbedding, u: Tensor, pos: Tensor, neg: Tensor) -> Tensor:
    d = torch.cat([model(u, pos).unsqueeze(1), model(u.unsqueeze(1), neg)], 1)
    return nn.functional.cross_entropy(-d, torch.zeros(len(u), dtype=torch.long, device=d.device))
