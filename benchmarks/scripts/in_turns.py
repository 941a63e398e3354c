"""Trains a model in blocks of steps, and switches the guard around this process off and on.

To be run under ``nanguard run``. The last line that it prints is JSON: for each kind of block the
milliseconds that a step took by the clock, and the microseconds of processor time.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from itertools import islice
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.guard_overhead import Decoder
from benchmarks.scripts.gpt import Tokens
from nanguard.replay.patches import _INHERITED
from nanguard.run import live

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Steps at the beginning in which the guard learns what a step is, and those at the beginning of
# each block that do not count: steps of a device are under way for some more.
_WARM, _SETTLING = 150, 5


class Switch:
    """Makes torch tell the guard around this process what happens, or not."""

    def __init__(self, guard: live.Live) -> None:
        undo = guard.patches._undo
        self._places = [(owner, name, vars(owner)[name], before) for owner, name, before in undo]
        for kind in guard.starts._hooked:
            self._places.append((kind, "__call__", vars(kind)["__call__"], _INHERITED))
        self._lines = guard.starts._lines
        self._is_on = True

    def turn(self, *, on: bool) -> None:
        """Switches it on or off."""
        if on is self._is_on:
            return
        self._is_on = on
        for owner, name, ours, before in self._places:
            if on or before is not _INHERITED:
                setattr(owner, name, ours if on else before)
            else:
                delattr(owner, name)
        if self._lines is not None:
            monitoring = sys.monitoring  # type: ignore[attr-defined]
            events = monitoring.events
            heard = events.LINE | events.PY_START | events.PY_RETURN
            for region, _ in self._lines._watched.values():
                monitoring.set_local_events(self._lines._tool, region.code, heard if on else 0)
            monitoring.restart_events()


def tiny(device: str, steps: int) -> Iterator[None]:
    """Trains a model so small that what is done around its steps shows."""
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(64, 64), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=device == "cuda")
    data = TensorDataset(torch.randn(32 * steps, 64), torch.randn(32 * steps, 1))
    for x, y in DataLoader(data, batch_size=32):
        x, y = x.to(device), y.to(device)
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield


def gpt(device: str, steps: int) -> Iterator[None]:
    """Trains a small language model as ``gpt.py`` does; on CUDA one bound by its launches."""
    cuda = device == "cuda"
    vocab, length, batch = (50304, 256, 2) if cuda else (2048, 64, 8)
    shape = (768, 12, 12) if cuda else (128, 4, 4)
    model = Decoder(vocab, length, *shape).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    loader = DataLoader(Tokens(steps * batch, length, vocab), batch_size=batch, pin_memory=cuda)
    for x, y in loader:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=cuda):
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield


_MODELS: dict[str, Callable[[str, int], Iterator[None]]] = {"tiny": tiny, "gpt": gpt}


def _times(steps: Iterator[None], count: int) -> tuple[float, float]:
    """Makes some steps; returns the seconds each took, and those of the processor."""
    next(islice(steps, _SETTLING - 1, None))
    _wait()
    began = time.perf_counter(), time.process_time()
    next(islice(steps, count - 1, None))
    _wait()
    return (time.perf_counter() - began[0]) / count, (time.process_time() - began[1]) / count


def _wait() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def main() -> None:
    """Trains and measures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="tiny", choices=_MODELS)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--block", type=int, default=0)
    args = parser.parse_args()
    guard = live.current
    if guard is None:
        sys.exit("start it with: nanguard run -- python -m benchmarks.scripts.in_turns")
    torch.manual_seed(0)
    if args.model == "tiny":
        torch.set_num_threads(1)
    began = time.perf_counter()
    train = _MODELS[args.model]
    each, _ = _times(train(args.device, _WARM + _SETTLING), _WARM)
    block = args.block or max(20, round(1 / each))
    steps = train(args.device, 3 * args.rounds * (block + _SETTLING))
    clock: dict[str, list[float]] = {"bare": [], "run": [], "bare again": []}
    host: dict[str, list[float]] = {kind: [] for kind in clock}
    switch, order = Switch(guard), random.Random(0)  # noqa: S311
    for _ in range(args.rounds):
        for kind in order.sample([*clock], k=3):
            switch.turn(on=kind == "run")
            seconds, of_processor = _times(steps, block)
            clock[kind].append(1000 * seconds)
            host[kind].append(1e6 * of_processor)
    switch.turn(on=True)
    model = f"{args.model}, {block} steps a block"
    took = round(time.perf_counter() - began)
    assert guard.starts.sees_models, guard.starts.why_not
    print(json.dumps({"model": model, "ms": clock, "host_us": host, "seconds": took}))


if __name__ == "__main__":
    main()
