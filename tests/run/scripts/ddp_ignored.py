"""Two ranks; in step 4 every label of the second one is to be ignored."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
generator = torch.Generator().manual_seed(rank)
for step in range(8):
    x = torch.randn(4, 6, generator=generator)
    y = torch.randint(0, 3, (4,), generator=generator)
    if step == 4 and rank == 1:
        y[:] = -100
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"made {step + 1} steps", flush=True)
dist.destroy_process_group()
