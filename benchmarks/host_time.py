"""How many microseconds of host time ``nanguard run`` takes from a healthy step.

A tiny script runs plainly and under ``nanguard run``, in turns. Each turn's time per step is that
of its quickest blocks, in CPU time of the process, so that a busy machine does not count; the
difference between the two is ours.

    python -m benchmarks.host_time
    python -m benchmarks.host_time --device cuda --rounds 3 --output results.json
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from benchmarks.run_overhead import last_line, machine, run, show, turns

# Of a turn's blocks, the share that counts: the others were disturbed.
_QUICK = 0.25


def measure(device: str, rounds: int, script: list[str]) -> dict[str, Any]:
    """Measures the time per step, with and without."""
    script = ["-m", "benchmarks.scripts.tiny", "--device", device, *script]
    steps: dict[bool, list[float]] = {False: [], True: []}
    losses = set()
    for guarded, folder in turns(rounds):
        said = last_line(run(guarded, script, folder)[0])
        times = sorted(said["us"])
        steps[guarded].append(statistics.mean(times[: max(1, int(_QUICK * len(times)))]))
        losses.add(said["loss"])
    plain, watched = (statistics.median(steps[guarded]) for guarded in (False, True))
    return {
        **machine(device),
        "us_plain": round(plain, 1),
        "us_run": round(watched, 1),
        "us_ours": round(watched - plain, 1),
        "turns_plain": [round(us, 1) for us in steps[False]],
        "turns_run": [round(us, 1) for us in steps[True]],
        "same_loss": len(losses) == 1,
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--block", type=int, default=100)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    script = ["--blocks", str(args.blocks), "--block", str(args.block)]
    show(measure(args.device, args.rounds, script), args.output)


if __name__ == "__main__":
    main()
