"""Trains tensors without a model, and ends itself before the backward pass of a bad step."""

import sys

import torch

torch.manual_seed(0)
x = torch.rand(64, 4)
y = (x.sum(1) > 2).float()
w = torch.zeros(4, requires_grad=True)
optimizer = torch.optim.SGD([w], lr=2e3)
for step in range(20):
    p = torch.sigmoid(x @ w)
    loss = -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()  # FAULT
    if not torch.isfinite(loss):
        if sys.argv[1] == "raise":
            raise FloatingPointError(f"step {step}")
        sys.exit(1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
