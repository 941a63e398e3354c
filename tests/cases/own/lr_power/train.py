"""Polynomial decay by LambdaLR; more steps than planned: (negative) ** 0.9 is complex -> the schedule uses abs/NaN."""
import torch
from torch import nn
from optim import build

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 30), nn.ReLU(), nn.Linear(30, 1))
optimizer, scheduler = build(model, total=90)
x = torch.randn(500, 10)
y = x[:, :3].prod(1, keepdim=True)
for step in range(120):
    rows = torch.randint(0, 500, (25,))
    loss = nn.functional.mse_loss(model(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    print(f"step {step} loss {loss.item():.4f}")
