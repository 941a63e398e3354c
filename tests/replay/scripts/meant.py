"""Trains without a fault, leaves its loop in the middle, and computes infinities that are meant."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)


def likelihood(x):
    return torch.log(net(x).relu().sum() * 0)


def train():
    for step in range(20):
        x = torch.rand(8, 4)
        if step == 15:
            break
        loss = net(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            with torch.no_grad():
                likelihood(x)


train()
lowest = likelihood(torch.rand(8, 4))
worst = float("inf")
print("the end", lowest.item())
if sys.argv[1] == "raise SystemExit":
    raise SystemExit(0)
