"""What the guard costs as models and jobs grow.

    python -m benchmarks.scale --ranks 2 4 8 16 --sharded 8
    python -m benchmarks.scale --device cuda --parameters 1e6 1e7 1e8 1e9 3e9 --output results.json

For each number of parameters, on one GPU: the ratio of a guarded to a bare step, in turns, and the
device memory that a guarded step needs more. For each number of ranks, on the CPU with gloo: the
same ratio under DDP, and what a bad step takes. From these a straight line over the logarithm of
the ranks says what to expect of more of them; it is a guess, and marked as one.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.guard_overhead import FUSED, Bench, Setting, block_time, exhaust, extra_memory
from benchmarks.run_overhead import last_line, machine, show

_ROOT = Path(__file__).resolve().parents[1]
# Models in the shape of GPT-2, by their parameters: vocabulary, width, heads and depth.
_SHAPES = {
    1e6: (2048, 128, 4, 4),
    1e7: (8192, 320, 5, 6),
    1e8: (50304, 704, 11, 12),
    1e9: (50304, 1600, 25, 30),
    3e9: (50304, 2560, 40, 36),
}
_LENGTH, _BATCH = 256, 4
# The job that nobody here has, and that the line is drawn to.
_FAR = 10_000


def with_parameters(count: float, rounds: int) -> dict[str, Any]:
    """Measures one size of a model."""
    vocab, width, heads, depth = _SHAPES[count]
    shape = {"vocab": vocab, "context": _LENGTH, "width": width, "heads": heads, "depth": depth}
    bench = Bench(Setting(f"{count:g}", "cuda", _BATCH, _LENGTH, shape, FUSED))
    ways = {"bare": bench.bare, "guard": bench.guarded(), "bare again": bench.bare}
    for way in ways.values():
        exhaust(way(4))
    ratios: dict[str, list[float]] = {name: [] for name in ways}
    bare: list[float] = []
    for _ in range(rounds):
        took = {name: block_time(way, 20) for name, way in ways.items()}
        bare.append(took["bare"])
        for name, milliseconds in took.items():
            ratios[name].append(milliseconds / took["bare"])
    return {
        "parameters": sum(p.numel() for p in bench.parameters),
        "bare_ms": round(statistics.median(bare), 3),
        "ratio": {name: round(statistics.median(r), 4) for name, r in ratios.items()},
        "spread": {name: [round(min(r), 4), round(max(r), 4)] for name, r in ratios.items()},
        "extra_memory_bytes": extra_memory(bench),
    }


def with_ranks(form: str, count: int) -> dict[str, Any]:
    """Measures one number of ranks, on the CPU."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={count}", "-m", "benchmarks.scripts.ranks", form]
    paths = [str(_ROOT / "src"), str(_ROOT), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)  # noqa: S603
    return last_line(done.stdout)


def expected(rows: list[dict[str, Any]], ranks: int) -> dict[str, float]:
    """Returns what a job of many ranks has to expect, by a line over the ranks' logarithm."""
    at = [math.log2(row["ranks"]) for row in rows]
    found: dict[str, float] = {"ranks": ranks}
    for name, values in {
        "guard_ratio": [row["ratio"]["guard"] for row in rows],
        "bad_step_over_bare_step": [row["bad_step_ms"] / row["bare_ms"] for row in rows],
    }.items():
        slope, begin = statistics.linear_regression(at, values)
        found[name] = round(begin + slope * math.log2(ranks), 3)
        found[f"{name}_each_doubling"] = round(slope, 4)
    return found


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--parameters", type=float, nargs="*", default=[], choices=list(_SHAPES))
    parser.add_argument("--ranks", type=int, nargs="*", default=[], help="of DDP")
    parser.add_argument("--sharded", type=int, nargs="*", default=[], help="ranks of FSDP2")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.parameters and not torch.cuda.is_available():
        parser.error("--parameters needs a CUDA device")
    result: dict[str, Any] = machine(args.device)
    for count in args.parameters:
        result.setdefault("parameters", []).append(with_parameters(count, args.rounds))
        print(json.dumps(result["parameters"][-1]), flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    for form, counts in (("ddp", args.ranks), ("fsdp", args.sharded)):
        for count in counts:
            result.setdefault(form, []).append(with_ranks(form, count))
            print(json.dumps(result[form][-1]), flush=True)
    if len(result.get("ddp", [])) > 2:
        result["simulated"] = expected(result["ddp"], _FAR)
    show(result, args.output)


if __name__ == "__main__":
    main()
