"""Trains on several ranks, bare and guarded in turns; started by torchrun.

    torchrun --nproc-per-node=4 -m benchmarks.scripts.ranks ddp

The last line that rank 0 prints is JSON: the milliseconds of a bare and of a guarded step, turn by
turn, and those of a step that is bad on one rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from itertools import islice
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from nanguard import Guard, Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

_WIDTH, _DEPTH, _BATCH = 256, 8, 32
_BAD_STEPS = 5


def model_of(form: str) -> nn.Module:
    """Returns a model that all ranks train together."""
    layers: list[nn.Module] = []
    for _ in range(_DEPTH):
        layers += [nn.Linear(_WIDTH, _WIDTH), nn.GELU()]
    layers.append(nn.Linear(_WIDTH, 1))
    model = nn.Sequential(*layers)
    if form == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in layers[::2]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


class Ranks:
    """A model, its optimizer, and two ways to train them."""

    def __init__(self, form: str) -> None:
        torch.manual_seed(0)
        self.model = model_of(form)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        # As many bad steps in a row as there are may be skipped.
        settings = Settings(snapshot_every=0, max_skips=2 * _BAD_STEPS)
        self._guard = Guard(self.model, self.optimizer, settings=settings)
        self._endless = iter(self._guard.watch(self))
        self._is_bad = False

    def __len__(self) -> int:
        """Says how many batches there are: ranks that do not know agree before each of them."""
        return sys.maxsize

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield self._batch()

    def _batch(self) -> tuple[Tensor, Tensor]:
        x = torch.randn(_BATCH, _WIDTH)
        if self._is_bad and dist.get_rank() == dist.get_world_size() - 1:
            x[0, 0] = float("nan")
        return x, torch.randn(_BATCH, 1)

    def bare(self, steps: int) -> None:
        """Trains without a guard."""
        for _ in range(steps):
            x, y = self._batch()
            F.mse_loss(self.model(x), y).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def guarded(self, steps: int) -> None:
        """Trains with one."""
        for x, y in islice(self._endless, steps):
            self._guard.backward(F.mse_loss(self.model(x), y))
            self._guard.step(max_norm=1.0)

    def bad_step(self) -> None:
        """Makes a step that is bad on one rank, and so is not made on any."""
        self._is_bad = True
        self.guarded(1)
        self._is_bad = False


def main() -> None:
    """Trains, and measures itself."""
    parser = argparse.ArgumentParser()
    parser.add_argument("form", choices=["ddp", "fsdp"])
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = Ranks(args.form)
    found: dict[str, list[float]] = {"bare": [], "guard": [], "bare again": [], "bad": []}
    ways = {"bare": ranks.bare, "guard": ranks.guarded, "bare again": ranks.bare}
    for way in ways.values():
        way(args.steps)
    for _ in range(args.turns):
        for name, way in ways.items():
            dist.barrier()
            began = time.perf_counter()
            way(args.steps)
            dist.barrier()
            found[name].append(1000 * (time.perf_counter() - began) / args.steps)
    for _ in range(_BAD_STEPS):
        ranks.guarded(args.steps)
        dist.barrier()
        began = time.perf_counter()
        ranks.bad_step()
        dist.barrier()
        found["bad"].append(1000 * (time.perf_counter() - began))
    if dist.get_rank() == 0:
        shares = {n: [b / a for a, b in zip(found["bare"], found[n], strict=True)] for n in ways}
        said = {
            "ranks": dist.get_world_size(),
            "form": args.form,
            "bare_ms": round(statistics.median(found["bare"]), 3),
            "ratio": {name: round(statistics.median(r), 4) for name, r in shares.items()},
            "spread": {name: [round(min(r), 4), round(max(r), 4)] for name, r in shares.items()},
            "bad_step_ms": round(statistics.median(found["bad"]), 3),
        }
        print(json.dumps(said), flush=True)
    sys.stdout.flush()
    # What torch tears down while Python ends may abort a rank after its last line.
    os._exit(0)


if __name__ == "__main__":
    main()
