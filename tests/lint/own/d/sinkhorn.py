import torch
from torch import Tensor


def sinkhorn(cost: Tensor, eps: float = 0.05, iters: int = 50) -> Tensor:
    K = torch.exp(-cost / eps)
    a = torch.full((cost.size(0),), 1 / cost.size(0), device=cost.device)
    b = torch.full((cost.size(1),), 1 / cost.size(1), device=cost.device)
    u, v = torch.ones_like(a), torch.ones_like(b)
    for _ in range(iters):
        u = a / (K @ v + 1e-12)
        v = b / (K.t() @ u + 1e-12)
    return u[:, None] * K * v[None]


def sinkhorn_log(cost: Tensor, eps: float = 0.05, iters: int = 50) -> Tensor:
    n, m = cost.shape
    f, g = cost.new_zeros(n), cost.new_zeros(m)
    for _ in range(iters):
        f = -eps * torch.logsumexp((g[None] - cost) / eps, 1)
        g = -eps * torch.logsumexp((f[:, None] - cost) / eps, 0)
    return ((f[:, None] + g[None] - cost) / eps).exp()


def row_normalise(p: Tensor) -> Tensor:
    return p / p.sum(-1, keepdim=True)


def plan_entropy(p: Tensor) -> Tensor:
    return -torch.where(p > 0, p * torch.log(p), torch.zeros_like(p)).sum()


def gw_cost(x: Tensor, y: Tensor) -> Tensor:
    return torch.cdist(x, y).pow(2)
