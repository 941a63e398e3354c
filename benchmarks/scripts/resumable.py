"""A small training that saves every few steps, resumes, and is killed at moments nobody knows."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import threading
import time
from pathlib import Path

import torch
from torch import nn


def main() -> None:
    """Trains."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--pause", type=float, default=0.004)
    parser.add_argument("--bad", type=int, default=-1, help="a batch that holds a NaN")
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--kill-within", type=float, default=0.5, help="seconds of training")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    start = 0
    if options.resume is not None:
        state = torch.load(options.resume, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        for group in optimizer.param_groups:
            group["lr"] = options.lr
        start = state["step"]
    _die_some_time(options)
    for step in range(start, options.steps):
        _step(model, optimizer, step + options.skip, options.bad)
        time.sleep(options.pause)
        if (step + 1) % options.every == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "step": step + 1}, options.out / f"step_{step + 1}.pt")
    content = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    finite = all(bool(torch.isfinite(p).all()) for p in model.parameters())
    print(json.dumps({"weights": hashlib.sha256(content).hexdigest(), "finite": finite}))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int, bad: int) -> None:
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(index))
    if index == bad:
        x[5] = float("nan")
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    if index == bad:
        raise RuntimeError(f"loss is {loss.item()}")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def _die_some_time(options: argparse.Namespace) -> None:
    """Sets the moment at which this attempt is killed, if it is one of those to be."""
    times = options.out / "kills.json"
    delays = json.loads(times.read_text()) if times.exists() else []
    if len(delays) >= options.kills:
        return
    delay = random.Random(len(delays)).uniform(0, options.kill_within)  # noqa: S311 - no secret
    times.write_text(json.dumps([*delays, delay]))
    timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    main()
