"""Steps that add up their loss over several turns of a loop, of which the last calls backward."""

import sys

from common import F, Net, batches, digest, nn, show, torch

TURNS = 3


def step_made(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def summed(net, optimizer, seen):
    total = 0.0
    for turn, (x, y) in enumerate(batches()):
        total = total + F.mse_loss(net(x), y)
        seen.append(turn)
        if turn % TURNS == TURNS - 1:
            step_made(optimizer, total / TURNS)
            show(turn, total)
            total = 0.0


def listed(net, optimizer, seen):
    losses = []
    for turn, (x, y) in enumerate(batches()):
        losses.append(F.mse_loss(net(x), y))
        seen.append(turn)
        if len(losses) == TURNS:
            step_made(optimizer, torch.stack(losses).mean())
            show(turn, losses[0])
            losses.clear()


def through_time(net, optimizer, seen):
    state, losses = torch.zeros(4, 1), []
    for turn, (x, y) in enumerate(batches()):
        state = torch.tanh(state + net(x))
        losses += [F.mse_loss(state, y)]
        seen.append(turn)
        if turn % TURNS == TURNS - 1:
            step_made(optimizer, sum(losses))
            show(turn, losses[-1])
            state, losses = torch.zeros(4, 1), []


def gradient(net, optimizer, seen):
    total = 0.0
    for turn, (x, _) in enumerate(batches()):
        gap = net(x + 1) * (turn != 7)
        total = total + gap.norm() + gap.square().sum().sqrt()  # FAULT IN BACKWARD
        seen.append(turn)
        if turn % TURNS == TURNS - 1:
            step_made(optimizer, total)
            show(turn, total)
            total = 0.0


def thrown_away(net, optimizer, seen):
    total = 0.0
    for turn, (x, y) in enumerate(batches()):
        total = total + F.mse_loss(net(x), y)
        seen.append(turn)
        if turn % TURNS == TURNS - 1:
            if torch.isfinite(total):
                step_made(optimizer, total)
            total = 0.0


class Learner:
    def __init__(self, net, optimizer):
        self.net, self.optimizer, self.losses = net, optimizer, []

    def observe(self, x, y):
        loss = F.mse_loss(self.net(x), y)
        self.losses.append(loss)
        if len(self.losses) == TURNS:
            step_made(self.optimizer, sum(self.losses))
            self.losses = []
        return loss


def in_object(net, optimizer, seen):
    learner = Learner(net, optimizer)
    for turn, (x, y) in enumerate(batches()):
        seen.append(turn)
        show(turn, learner.observe(x, y))


ways = (summed, listed, through_time, gradient, thrown_away, in_object)
torch.manual_seed(0)
net, seen = Net(), []
net.norm, net.drop = nn.Identity(), nn.Dropout(0.1)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
{f.__name__: f for f in ways}[sys.argv[1]](net, optimizer, seen)
print(len(seen), digest(net))
