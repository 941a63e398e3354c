"""Trains 12 steps under a guard of its own; the batch of step 5 holds a NaN."""

import torch

from nanguard import Guard

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
batches = [torch.randn(8, 4) for _ in range(12)]
batches[5][0] = float("nan")
guard = Guard(model, optimizer)
for x in guard.watch(batches):
    guard.backward((model(x) ** 2).mean())
    guard.step()
# Not closed: what was written must be complete all the same.
