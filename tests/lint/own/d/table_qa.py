import torch
from torch import nn
import torch.nn.functional as F


class CellSelector(nn.Module):
    """Scores the cells of a table for a question."""

    def __init__(self, d: int):
        super().__init__()
        self.q, self.k = nn.Linear(d, d), nn.Linear(d, d)
        self.scale = d ** -0.5

    def forward(self, question, cells, cell_mask):
        s = torch.einsum("bd,bnd->bn", self.q(question), self.k(cells)) * self.scale
        s = s.masked_fill(~cell_mask, float("-inf"))
        if torch.all(s == float("-inf")):
            s = torch.zeros_like(s)
        return F.softmax(s, dim=-1)


class Aggregator(nn.Module):
    def __init__(self, d, ops=4):
        super().__init__()
        self.fc = nn.Linear(d, ops)

    def forward(self, question, p, values):
        total = (p * values).sum(-1)
        count = p.sum(-1)
        mean = total / count.clamp(min=1e-6)
        w = self.fc(question).softmax(-1)
        return (w * torch.stack([total, count, mean, values.amax(-1)], -1)).sum(-1)


def loss_fn(pred, answer, p, gold):
    huber = F.huber_loss(pred, answer, delta=10.0)
    sel = -(gold * p.clamp(min=1e-6).log()).sum(-1).mean()
    return huber + sel
