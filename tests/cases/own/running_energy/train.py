"""Speech features normalised by a running energy kept in a buffer."""
import torch
from torch import nn
from norm import RunningEnergy

torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = RunningEnergy(12)
        self.net = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 2))

    def forward(self, x):
        return self.net(self.norm(x))


model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(160):
    x = torch.randn(16, 12)
    y = (x[:, 0] > 0).long()
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")
