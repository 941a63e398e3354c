"""Gumbel-softmax routing whose temperature is annealed by a schedule that reaches 0."""
import torch
from torch import nn
from schedule import temperature

torch.manual_seed(0)


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.score = nn.Linear(10, 4)
        self.experts = nn.Parameter(torch.randn(4, 10) * 0.3)

    def forward(self, x, tau):
        route = torch.softmax(self.score(x) / tau, dim=-1)
        return (route @ self.experts * x).sum(-1)


model = Router()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
total = 150
for step in range(200):
    x = torch.randn(32, 10)
    y = x.clamp_min(0).sum(-1)
    loss = nn.functional.mse_loss(model(x, temperature(step, total)), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")
