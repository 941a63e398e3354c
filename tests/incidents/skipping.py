"""A script that looks at its loss itself and passes bad steps over; one sample is bad."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x, y = torch.randn(64, 4), torch.randn(64, 1)
x[17] = float("nan")
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=False)
model = nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(3):
    for a, b in loader:
        loss = nn.functional.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
