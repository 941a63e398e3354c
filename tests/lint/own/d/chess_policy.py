import torch
from torch import nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.a, self.b = nn.Conv2d(c, c, 3, padding=1), nn.Conv2d(c, c, 3, padding=1)
        self.na, self.nb = nn.BatchNorm2d(c), nn.BatchNorm2d(c)

    def forward(self, x):
        return F.relu(x + self.nb(self.b(F.relu(self.na(self.a(x))))))


class ChessNet(nn.Module):
    def __init__(self, c=128, blocks=10, moves=4672):
        super().__init__()
        self.stem = nn.Conv2d(119, c, 3, padding=1)
        self.body = nn.Sequential(*[Block(c) for _ in range(blocks)])
        self.policy = nn.Sequential(nn.Conv2d(c, 73, 1), nn.Flatten())
        self.value = nn.Sequential(nn.Conv2d(c, 1, 1), nn.Flatten(), nn.Linear(64, 1), nn.Tanh())

    def forward(self, x):
        h = self.body(self.stem(x))
        return self.policy(h), self.value(h).squeeze(-1)


def loss_fn(net, board, legal, move, outcome):
    logits, v = net(board)
    logits.masked_fill_(~legal, -torch.inf)
    pol = nn.CrossEntropyLoss()(logits, move)
    val = F.mse_loss(v, outcome)
    return torch.clamp(pol + val, max=10.0)


@torch.no_grad()
def priors(net, board, legal, temperature=1.0):
    logits, v = net(board)
    p = (logits / temperature).masked_fill(~legal, float("-inf")).softmax(-1)
    return p, v


def visit_policy(visits, t=1.0):
    v = visits.float().pow(1.0 / t)
    return v / v.sum(-1, keepdim=True).clamp(min=1e-9)
