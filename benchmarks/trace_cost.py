"""What it costs to watch every operation of a step: time, and memory.

Bare and traced steps take turns in one process; the ratio compares their medians. ``closer`` is
the second look, which reads smallest and largest values. With ``--tiny`` a model of the same depth
has so little to compute that only the host's time for each operation is left; with ``--late`` a
CPU is treated as a device, whose results are read at the end.

    python -m benchmarks.trace_cost
    python -m benchmarks.trace_cost --device cuda --output results.json
    python -m benchmarks.trace_cost --tiny --late --rounds 25
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
from nanguard.replay.tracer import tensor_values as values
from nanguard.replay.tracer.trace import Trace


class Step:
    """A training step that can be repeated."""

    def __init__(self, device: str, *, tiny: bool = False) -> None:
        cuda = device == "cuda"
        torch.manual_seed(0)
        vocab, length, batch = (50304, 1024, 16) if cuda else (8192, 256, 8)
        shape = (768, 12, 12) if cuda else (256, 8, 6)
        if tiny:
            vocab, length, batch, shape = 64, 8, 2, (16, 2, 12)
        self.device = device
        self.half = cuda or tiny
        self.model: nn.Module = Decoder(vocab, length, *shape).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)
        self.text = torch.randint(0, vocab, (batch, length + 1), device=device)

    def __call__(self) -> Tensor:
        """Makes one step."""
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.half):
            logits = self.model(self.text[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), self.text[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def timed(step: Step, kind: str) -> tuple[float, int]:
    """Returns the seconds of one step, and how many operations were watched.

    Args:
        step: The step.
        kind: How it is made: ``bare``, ``traced`` or ``closer``.
    """
    if step.device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    count = 0
    if kind == "bare":
        step()
    else:
        trace = Trace(exact=kind == "closer")
        trace.start()
        trace.begin_step(0)
        step()
        trace.stop()
        trace.resolve()
        count = len(trace.records)
        assert not trace.bad
        assert not trace.unmeasured
    if step.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began, count


def peak_memory(step: Step, kind: str) -> int:
    """Returns the bytes that a step needs at its peak, in all."""
    if step.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        timed(step, kind)
        return int(torch.cuda.max_memory_allocated())
    torch.set_num_threads(1)
    reader, writer = os.pipe()
    if os.fork() == 0:
        timed(step, kind)
        os.write(writer, str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss).encode())
        os._exit(0)
    os.close(writer)
    kilobytes = int(os.read(reader, 64))
    os.wait()
    return kilobytes * 1024


def measure(device: str, rounds: int, *, tiny: bool = False) -> dict[str, Any]:
    """Measures time, then memory."""
    step = Step(device, tiny=tiny)
    kinds = ("bare", "traced", "closer")
    for kind in ("bare", "bare", *kinds):
        timed(step, kind)
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    count = 0
    for _ in range(rounds):
        for kind in kinds:
            seconds, watched = timed(step, kind)
            times[kind].append(1000 * seconds)
            count = max(count, watched)
    middle = {kind: statistics.median(times[kind]) for kind in kinds}
    least = {kind: min(times[kind]) for kind in kinds}
    memory = {kind: peak_memory(step, kind) for kind in kinds[:2]}
    return {
        "device": torch.cuda.get_device_name()
        if device == "cuda"
        else platform.processor() or "cpu",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "operations": count,
        "ms_bare": round(middle["bare"], 2),
        "ms_traced": round(middle["traced"], 2),
        "ms_closer": round(middle["closer"], 2),
        "ratio": round(middle["traced"] / middle["bare"], 3),
        "ratio_closer": round(middle["closer"] / middle["bare"], 3),
        # Least of all rounds: what other work on the machine adds is left out.
        "us_per_operation": round(1000 * (least["traced"] - least["bare"]) / count, 1),
        "peak_bare": memory["bare"],
        "peak_traced": memory["traced"],
        "memory_ratio": round(memory["traced"] / memory["bare"], 4),
        "command": " ".join(sys.argv),
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tiny", action="store_true", help="measure the host's time")
    parser.add_argument("--late", action="store_true", help="treat a CPU as a device")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.late:
        values.is_late = lambda tensor: True
    result = measure(args.device, args.rounds, tiny=args.tiny)
    print(json.dumps(result, indent=1))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
