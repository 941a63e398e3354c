"""Trains with a GradScaler, whose float16 gradients overflow, or are bad at any scale."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(40):
    x = torch.randn(16, 8)
    apart, weight = torch.ones(16), 1.0
    if sys.argv[1] == "bad" and step in (25, 30):
        apart[3] = 0.0
    if sys.argv[1] == "large" and step in (25, 30):
        weight = 2000.0
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
    gaps = ((out.float() * apart[:, None]) ** 2).sum(1).sqrt()  # FAULT AT ANY SCALE
    optimizer.zero_grad()
    scaler.scale(gaps.mean() * weight).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    print(step, gaps.mean().item(), scaler.get_scale())
