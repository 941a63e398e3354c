"""Data that lies on a device, one sample of which cannot be divided."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

DEVICE = sys.argv[1]
if DEVICE == "late":
    # As if the numbers of a CPU were as far away as those of a GPU.
    from nanguard.replay.tracer import tensor_values as values

    DEVICE, values.is_late = "cpu", lambda tensor: True


class Rates(Dataset):
    def __init__(self):
        self.total = torch.rand(24, 4, device=DEVICE) + 1
        self.count = torch.ones(24, 1, device=DEVICE)
        self.total[13] = self.count[13] = 0

    def __len__(self):
        return 24

    def __getitem__(self, i):
        return self.total[i] / self.count[i]


torch.manual_seed(0)
model = nn.Linear(4, 1).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for x in DataLoader(Rates(), batch_size=4):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
