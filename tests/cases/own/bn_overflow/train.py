"""Counts from a detector; a few frames carry raw ADC sums (1e21), squared in the BatchNorm's variance."""
import torch
from torch import nn
from torch.utils.data import DataLoader
from frames import Frames

torch.manual_seed(3)
model = nn.Sequential(nn.BatchNorm1d(10), nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
loader = DataLoader(Frames(), batch_size=8)
step = 0
for epoch in range(2):
    model.train()
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x).squeeze(1), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")
        step += 1
    model.eval()
    with torch.no_grad():
        x, y = next(iter(loader))
        print("eval", nn.functional.mse_loss(model(x).squeeze(1), y).item())
