"""Learned step-size quantisation; the gradient of the step uses log2 in backward."""
import torch
from torch import nn
from quant import LearnedStep

torch.manual_seed(5)
model = nn.Sequential(nn.Linear(8, 16), LearnedStep(), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
x = torch.randn(600, 8)
y = torch.tanh(x[:, :2].sum(1, keepdim=True))
for step in range(120):
    rows = torch.randint(0, 600, (20,))
    loss = nn.functional.mse_loss(model(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.4f}")
