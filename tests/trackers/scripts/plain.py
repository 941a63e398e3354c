"""Trains 20 steps; the batch of step 5 holds an infinity."""

import torch

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(20):
    x = torch.randn(8, 4)
    if step == 5:
        x[0] = float("inf")
    loss = (model(x) ** 2).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
