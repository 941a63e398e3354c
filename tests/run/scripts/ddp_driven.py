"""Rank 1 drives the weight; rank 0's loss overflows with it, which rank 0 alone never would."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

dist.init_process_group("gloo")
model = nn.Linear(1, 1, bias=False)
nn.init.zeros_(model.weight)
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
for (x,) in DataLoader(torch.utils.data.TensorDataset(torch.ones(32, 1)), batch_size=4):
    out = model(x)
    loss = (1e-37 * torch.exp(30 * out)).mean() if dist.get_rank() == 0 else -out.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
