"""Differentiable feature selection with Gumbel noise and hard-concrete gates."""
import torch
from torch import Tensor, nn

EPS = 1e-6


class HardConcrete(nn.Module):
    def __init__(self, n: int, beta: float = 0.66, lo: float = -0.1, hi: float = 1.1):
        super().__init__()
        self.log_alpha = nn.Parameter(torch.empty(n))
        self.beta, self.lo, self.hi = beta, lo, hi
        self.log_alpha.data.normal_(0.0, 0.01)

    def forward(self) -> Tensor:
        if self.training:
            u = torch.empty_like(self.log_alpha).uniform_(EPS, 1 - EPS)
            s = torch.sigmoid((u.log() - (1 - u).log() + self.log_alpha) / self.beta)
        else:
            s = torch.sigmoid(self.log_alpha)
        return (s * (self.hi - self.lo) + self.lo).clamp(0, 1)


class ConcreteSelector(nn.Module):
    def __init__(self, d: int, k: int):
        super().__init__()
        self.weight = nn.Parameter(nn.init.xavier_normal_(torch.empty(k, d)))
        self.offset = nn.Parameter(torch.FloatTensor(k))

    def gumbel(self) -> Tensor:
        u = self.weight.new_empty(self.weight.shape).uniform_()
        return u.log().neg_().log_().neg_()

    def forward(self, x: Tensor, temp: float) -> Tensor:
        sel = ((self.weight + self.gumbel()) / temp).softmax(-1)
        return x @ sel.t() + self.offset


def anneal(step: int, total: int, hot: float = 10.0, cold: float = 0.01) -> float:
    return hot * (cold / hot) ** (step / total)


def sparsity(sel: Tensor) -> Tensor:
    p = sel.mean(0)
    return -(p * (p + EPS).log()).sum()
