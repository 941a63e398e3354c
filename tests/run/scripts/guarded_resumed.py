"""A script with a guard of its own, which goes on from step 10,000."""

import torch
from torch import nn

from nanguard import Guard, Settings

torch.manual_seed(0)
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
guard = Guard(model, optimizer, settings=Settings(max_bad=1))
state = guard.state_dict()
state["moment"]["step"] = 10_000
guard.load_state_dict(state)
batches = [torch.randn(4, 2) for _ in range(12)]
for index in (5, 9):
    batches[index][0, 0] = float("nan")
for batch in guard.watch(batches):
    guard.backward(model(batch).square().mean())
    guard.step()
