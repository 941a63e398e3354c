"""Two ranks under a guard; one of them is killed in a phase of a step, if that is wanted."""

import hashlib
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from nanguard import Guard, Settings

folder, phase, victim, at = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank = dist.get_rank()
torch.manual_seed(0)


def die(now: str, step: int) -> None:
    """Kills this process, if it is its turn."""
    if now == phase and rank == victim and step >= at:
        os.kill(os.getpid(), signal.SIGKILL)


class Batches(torch.utils.data.Dataset[torch.Tensor]):
    """Ranks have batches of their own."""

    def __len__(self) -> int:
        """There are a few."""
        return 30

    def __getitem__(self, index: int) -> torch.Tensor:
        """Draws a batch that is always the same."""
        die("data", index)
        generator = torch.Generator().manual_seed(100 * rank + index)
        return torch.randn(8, 4, generator=generator)


die("start", at)
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
settings = Settings(snapshot_every=3, disk_every=3)
guard = Guard(model, optimizer, run_dir=folder / "run", settings=settings)
guard.resume()
while guard.epoch < 2:
    for index, x in guard.enumerate(torch.utils.data.DataLoader(Batches(), batch_size=None)):
        die("forward", index)
        loss = model(x).square().mean()
        die("backward", index)
        guard.backward(loss)
        die("step", index)
        guard.step(max_norm=1.0)
        if index % 3 == 2:
            die("snapshot", index)
        die("after", index)
    guard.end_epoch()
guard.close()
state = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
if rank == 0:
    steps = (folder / "run" / "metrics.jsonl").read_text().count("\n")
    print(hashlib.sha256(state).hexdigest(), steps, flush=True)
dist.barrier()
dist.destroy_process_group()
