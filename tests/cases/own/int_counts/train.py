"""Perplexity-weighted loss; token counts are kept in int16 and wrap."""
import torch
from torch import nn
from vocab import Counts

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(30, 16), nn.Flatten(), nn.Linear(16 * 4, 30))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
counts = Counts(30)
for step in range(120):
    x = (torch.rand(64, 4) ** 3 * 30).long()
    y = x[:, 0]
    counts.update(x)
    loss = nn.functional.cross_entropy(model(x), y, weight=counts.weights())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.4f}")
