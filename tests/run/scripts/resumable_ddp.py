"""Trains under DDP, saves and resumes; in the first attempt rank 1 is killed at step 10."""

import argparse
import gc
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path)
parser.add_argument("--resume")
options = parser.parse_args()
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
start = 0
if options.resume:
    state = torch.load(options.resume)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    start = state["step"]
options.out.mkdir(exist_ok=True)
for step in range(start, 16):
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(2 * step + rank))
    loss = (model(x) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.02)
    if not options.resume and step == 10 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0 and (step + 1) % 4 == 0:
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "step": step + 1}, options.out / f"step_{step + 1}.pt")
print(f"rank {rank} ends at {step + 1}", flush=True)
# DDP holds the connection; it has to let go for the connection to be closed before the end.
del model, optimizer
gc.collect()
dist.destroy_process_group()
