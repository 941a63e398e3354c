"""Trains under DDP with a norm over all ranks and a loss that is gathered for a log.

The column that both ranks add to the batch becomes constant at step 5: its variance, taken from the
mean of the squares, is 0, and the norm divides by its root.
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as together
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Norm(nn.Module):
    def forward(self, x):
        sums = together.all_reduce(torch.stack([x.mean(0), (x * x).mean(0)]))
        mean, square = sums / dist.get_world_size()
        spread = (square - mean * mean).clamp(min=0.0)
        return (x - mean) / spread.sqrt()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(Norm(), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    for step in range(8):
        x = torch.randn(8, 4, generator=generator)
        if step == 5:
            x[:, 2] = 1.0
        loss = (model(x) ** 2).mean()
        every = [torch.zeros_like(loss) for _ in range(dist.get_world_size())]
        dist.all_gather(every, loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"rank {rank} step {step} loss {sum(every).item():.6f}", flush=True)
    total = sum(p.detach().sum() for p in model.parameters())
    print(f"rank {rank} weights {total.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
