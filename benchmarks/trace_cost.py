"""What it costs to watch every operation of a step: time, and memory.

Bare and traced steps take turns in one process; the ratio compares their medians.

    python -m benchmarks.trace_cost
    python -m benchmarks.trace_cost --device cuda --output results.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.guard_overhead import Decoder
from nanguard.tracer.trace import Trace


class Step:
    """A training step that can be repeated."""

    def __init__(self, device: str) -> None:
        cuda = device == "cuda"
        torch.manual_seed(0)
        vocab, length, batch = (50304, 1024, 16) if cuda else (8192, 256, 8)
        shape = (768, 12, 12) if cuda else (256, 8, 6)
        self.device = device
        self.model: nn.Module = Decoder(vocab, length, *shape).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)
        self.text = torch.randint(0, vocab, (batch, length + 1), device=device)

    def __call__(self) -> Tensor:
        """Makes one step."""
        cuda = self.device == "cuda"
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=cuda):
            logits = self.model(self.text[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), self.text[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def timed(step: Step, *, traced: bool) -> tuple[float, int]:
    """Returns the seconds of one step, and how many operations were watched."""
    if step.device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    count = 0
    if traced:
        trace = Trace()
        trace.start()
        trace.begin_step(0)
        step()
        trace.stop()
        trace.resolve()
        count = len(trace.records)
        assert not trace.bad
    else:
        step()
    if step.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began, count


def peak_memory(step: Step, *, traced: bool) -> int:
    """Returns the bytes that a step needs at its peak, in all."""
    if step.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        timed(step, traced=traced)
        return int(torch.cuda.max_memory_allocated())
    torch.set_num_threads(1)
    reader, writer = os.pipe()
    if os.fork() == 0:
        timed(step, traced=traced)
        os.write(writer, str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss).encode())
        os._exit(0)
    os.close(writer)
    kilobytes = int(os.read(reader, 64))
    os.wait()
    return kilobytes * 1024


def measure(device: str, rounds: int) -> dict[str, Any]:
    """Measures time, then memory."""
    step = Step(device)
    for _ in range(3):
        step()
    timed(step, traced=True)
    times: dict[bool, list[float]] = {False: [], True: []}
    count = 0
    for _ in range(rounds):
        for traced in (False, True):
            seconds, watched = timed(step, traced=traced)
            times[traced].append(1000 * seconds)
            count = max(count, watched)
    bare, slow = statistics.median(times[False]), statistics.median(times[True])
    memory = {traced: peak_memory(step, traced=traced) for traced in (False, True)}
    return {
        "device": torch.cuda.get_device_name()
        if device == "cuda"
        else platform.processor() or "cpu",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "operations": count,
        "ms_bare": round(bare, 2),
        "ms_traced": round(slow, 2),
        "ratio": round(slow / bare, 3),
        "peak_bare": memory[False],
        "peak_traced": memory[True],
        "memory_ratio": round(memory[True] / memory[False], 4),
        "command": " ".join(sys.argv),
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    result = measure(args.device, args.rounds)
    print(json.dumps(result, indent=1))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
