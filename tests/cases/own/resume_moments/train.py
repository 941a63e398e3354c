"""Continues a run: weights fine, one second moment of Adam is infinite/NaN."""
import os
import torch
from torch import nn
from engine import Trainer

torch.manual_seed(1)
model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
trainer = Trainer(model, optimizer)
x = torch.randn(300, 6)
y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
for step in range(5):
    trainer.step(x[:30], y[:30])
trainer.save("last.pt")
state = torch.load("last.pt")
state["optimizer"]["state"][2]["exp_avg_sq"][1, 4] = float("nan")
torch.save(state, "last.pt")

trainer.resume("last.pt")
for step in range(30):
    rows = torch.randperm(300)[:30]
    loss = trainer.step(x[rows], y[rows])
    print(f"step {step} loss {loss:.4f}")
