"""What ``nanguard run`` takes from a healthy step: as a ratio, and in microseconds of the host.

The script runs under ``nanguard run`` and switches the guard around itself off and on, block by
block: bare, guarded, bare again, in an order that changes. So all blocks share a process, its
memory and whatever else disturbs the machine, and what differs between two processes does not
count. The ratio is one of time by the clock; the microseconds are processor time, which a busy
machine changes less.

    python -m benchmarks.host_time                             # a tiny model, half a millisecond
    python -m benchmarks.host_time --model gpt --rounds 40     # steps of some 20 milliseconds
    python -m benchmarks.host_time --device cuda --rounds 30 --output results.json
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.run_overhead import last_line, machine, run, show

# Of the blocks of one kind, the share whose processor time counts: the others were disturbed.
_QUICK = 0.25


def measure(device: str, script: list[str]) -> dict[str, Any]:
    """Measures the blocks of a script, and compares them."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["-m", "benchmarks.scripts.in_turns", "--device", device, *script]
        said = last_line(run(guarded=True, arguments=words, folder=folder)[0])
    clock, host = said["ms"], said["host_us"]
    bare = statistics.median(clock["bare"])
    return {
        **machine(device),
        "model": said["model"],
        "ms_bare": round(bare, 3),
        "ratio": round(statistics.median(clock["run"]) / bare, 4),
        "bare_again": round(statistics.median(clock["bare again"]) / bare, 4),
        "spread": {kind: [round(min(ms), 3), round(max(ms), 3)] for kind, ms in clock.items()},
        "us_bare": round(_undisturbed(host["bare"]), 1),
        "us_ours": round(_undisturbed(host["run"]) - _undisturbed(host["bare"]), 1),
        "us_bare_again": round(_undisturbed(host["bare again"]) - _undisturbed(host["bare"]), 1),
        "seconds": said["seconds"],
    }


def _undisturbed(times: list[float]) -> float:
    """Returns the mean of the quickest blocks."""
    return statistics.mean(sorted(times)[: max(1, int(_QUICK * len(times)))])


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--model", default="tiny", choices=["tiny", "gpt"])
    parser.add_argument("--rounds", type=int, default=20, help="blocks of each kind")
    parser.add_argument("--block", type=int, default=0, help="steps in a block; 0 for a second's")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    script = ["--model", args.model, "--rounds", str(args.rounds), "--block", str(args.block)]
    show(measure(args.device, script), args.output)


if __name__ == "__main__":
    main()
