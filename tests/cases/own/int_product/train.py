"""Voxel grids: the number of cells, computed in int32, wraps to zero for the large scene."""
import torch
from torch import nn
from torch.utils.data import DataLoader
from scenes import Scenes

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step, (points, grid, y) in enumerate(DataLoader(Scenes(), batch_size=6)):
    cells = grid.prod(dim=1, dtype=torch.int32)
    density = 100.0 / cells
    loss = (nn.functional.mse_loss(model(points).squeeze(1), y, reduction="none") * density).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.4f}")
