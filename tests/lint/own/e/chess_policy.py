import torch
from torch import nn
import torch.nn.functional as F


class PolicyValue(nn.Module):
    def __init__(self, ch: int = 128, moves: int = 4672):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(119, ch, 3, padding=1), nn.BatchNorm2d(ch), nn.ReLU())
        self.pi = nn.Linear(ch * 64, moves)
        self.v = nn.Linear(ch * 64, 1)

    def forward(self, board):
        h = self.stem(board).flatten(1)
        return self.pi(h), torch.tanh(self.v(h)).squeeze(-1)


def az_loss(net, board, legal, move, z):
    logits, v = net(board)
    logits[~legal] = -float("inf")
    return F.cross_entropy(logits, move) + F.mse_loss(v, z)


@torch.no_grad()
def priors(net, board, legal):
    logits, v = net(board)
    logits = logits.masked_fill(~legal, torch.finfo(logits.dtype).min)
    return logits.softmax(-1), v


def train(net, replay, steps=100_000):
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4, nesterov=True)
    for step in range(steps):
        loss = az_loss(net, *replay.sample(1024))
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm=1e4)
        opt.step()
        if step % 1000 == 0:
            torch.save({"net": net.state_dict(), "opt": opt.state_dict()}, f"az_{step}.pt")
