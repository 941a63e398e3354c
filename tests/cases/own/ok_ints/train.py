"""Hashes that wrap on purpose, integer division, log of safe counts."""
import torch
from torch import nn
torch.manual_seed(0)
table = nn.Embedding(64, 8); out = nn.Linear(8, 1)
opt = torch.optim.Adagrad([*table.parameters(), *out.parameters()], 0.05)
seen = torch.zeros(64, dtype=torch.int32)
for step in range(80):
    ids = torch.randint(0, 2**31 - 1, (32,), dtype=torch.int32)
    bucket = ((ids * 1664525 + 1013904223).long() % 64)
    seen += torch.bincount(bucket, minlength=64).int()
    w = 1.0 / torch.log1p(seen[bucket].clamp_min(1).float())
    loss = ((out(table(bucket)).squeeze(1) - (ids % 2).float()) ** 2 * w).mean()
    opt.zero_grad(); loss.backward(); opt.step()
    print(f"step {step} loss {loss.item():.4f}")
