"""A guard with incidents in a loop of its own."""

import torch
from torch import nn

import nanguard

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
data = [(torch.randn(8, 4), torch.rand(8, 1)) for _ in range(6)]
data[3][1][2] = -1.0
guard = nanguard.Guard(model, optimizer, incidents="incidents")
for a, b in guard.watch(data):
    loss = ((model(a) - b.log()) ** 2).mean()
    guard.backward(loss)
    guard.step()
