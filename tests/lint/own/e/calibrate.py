import torch
from torch import nn, Tensor
import torch.nn.functional as F


class TemperatureScaler(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_t = nn.Parameter(torch.zeros(()))

    def forward(self, logits: Tensor) -> Tensor:
        return logits / self.log_t.clamp(-3.0, 3.0).exp()

    def fit(self, logits: Tensor, y: Tensor, iters: int = 100) -> float:
        opt = torch.optim.LBFGS([self.log_t], lr=0.1, max_iter=iters)

        def closure():
            opt.zero_grad()
            loss = F.cross_entropy(self(logits), y)
            loss.backward()
            return loss

        opt.step(closure)
        return self.log_t.clamp(-3.0, 3.0).exp().item()


@torch.no_grad()
def ece(probs: Tensor, y: Tensor, bins: int = 15) -> float:
    conf, pred = probs.max(-1)
    hit = (pred == y).float()
    total = 0.0
    edges = torch.linspace(0, 1, bins + 1)
    for lo, hi in zip(edges[:-1], edges[1:]):
        m = (conf > lo) & (conf <= hi)
        if m.any():
            total += (m.float().mean() * (hit[m].mean() - conf[m].mean()).abs()).item()
    return total


@torch.no_grad()
def entropy(logits: Tensor) -> Tensor:
    lp = F.log_softmax(logits, -1)
    return -(lp.exp() * lp).sum(-1)


def brier(probs: Tensor, y: Tensor) -> Tensor:
    return (probs - F.one_hot(y, probs.size(-1))).square().sum(-1).mean()
