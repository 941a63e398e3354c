"""Trains under DDP; rank 1 meets a batch with a NaN at step 4."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import all_reduce
from torch.nn.parallel import DistributedDataParallel


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    for step in range(8):
        x = torch.randn(4, 6, generator=generator)
        scale = torch.ones(4, 1)
        if step == 4 and rank == 1:
            scale[2] = 0.0
        loss = (model(x / scale) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        all_reduce(loss.detach())  # behind the backward pass: each rank can replay alone
        print(f"rank {rank} step {step} loss {loss.item():.4f}", flush=True)
    total = sum(p.detach().sum() for p in model.parameters())
    print(f"rank {rank} weights {total.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
