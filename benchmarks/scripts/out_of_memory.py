"""A bad step whose replays run out of memory: the model is called a few times, then no more."""

import sys

import torch
from torch import nn

ALLOWED = int(sys.argv[1])


class Model(nn.Module):
    """Calls of one input are counted; from the second step's on, few are allowed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Finds no memory once the bad step was replayed often enough."""
        if ALLOWED and len(seen) >= ALLOWED and float(x[0, 0]) == -1.0:
            torch.empty(1 << 60)  # what an allocator says is what it always says
        if float(x[0, 0]) == -1.0:
            seen.append(1)
        out: torch.Tensor = self.layer(x)
        return out


seen: list[int] = []
torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    x = torch.full((3, 4), -1.0 if step == 3 else 1.0)
    optimizer.zero_grad()
    loss = model(x).square().mean() + x.clamp(max=0).sqrt().sum()
    if torch.isfinite(loss):
        loss.backward()
        optimizer.step()
print([round(float(v), 6) for v in model.layer.weight.flatten()], float(model.layer.bias))
