"""Every benchmark whose figures the pages quote, one after the other, into ``benchmarks/results``.

    python -m benchmarks.suite cpu [--only NAME ...] [--folder DIR]
    python -m benchmarks.suite gpu

Each runs in a process of its own. Its result file gets the commit, the date and the machine; the
pages quote the file (see ``tests/test_figures.py``).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.recording import RESULTS, environment

# The file each run is written to, and its words; what runs long is asked for in fewer rounds.
CPU = {
    "guard_overhead_cpu": "guard_overhead --only CPU --rounds 8",
    "run_overhead_cpu": "run_overhead --rounds 3 --blocks 12",
    "trace_cost_cpu": "trace_cost --rounds 7",
    "ops_speed_cpu": "ops_speed --device cpu",
    "scan_checkpoint_cpu": "scan_checkpoint",
    "scan_data_cpu": "scan_data",
    "scan_log_cpu": "scan_log",
    "lint_speed_cpu": "lint_speed --lines 0",
    "check_cold_cpu": "check_cold",
}
GPU = {
    "guard_overhead_h200_busy": "guard_overhead --only T=1024 --rounds 3",
    "guard_overhead_h200_launch_bound": "guard_overhead --only T=256 --rounds 4 --fast",
    "run_overhead_h200": "run_overhead --device cuda --rounds 3",
    "run_overhead_h200_launch_bound": "run_overhead --device cuda --launch-bound --block 40 "
    "--blocks 3 --rounds 4",
    "scale_h200": "scale --device cuda --parameters 1e6 1e7 1e8 1e9 3e9 --rounds 5 "
    "--ranks 2 4 8 16 --sharded 8",
    "trace_cost_h200": "trace_cost --device cuda --rounds 7",
    # The processors beside the GPU: two cores are too few for a quiet measurement.
    "host_time_cpu16": "host_time --rounds 30",
    "host_time_gpt_cpu16": "host_time --model gpt --rounds 40",
    "host_time_h200": "host_time --device cuda --rounds 12",
    "host_time_gpt_h200": "host_time --device cuda --model gpt",
    "ops_speed_h200": "ops_speed --device cuda --rounds 15",
    "ops_speed_h200_large": "ops_speed --device cuda --rounds 9 --scale 4",
    "ops_speed_h200_compiled": "ops_speed --device cuda --rounds 7 --scale 4 --compiled --only RMS "
    "AdaLN masked_ checked mask_logits soft_cap safe_div safe_norm safe_std add_noise",
}


def run(name: str, words: str, folder: Path) -> bool:
    """Runs one benchmark and writes its result file; returns whether it could be run."""
    module, *rest = words.split()
    command = f"python -m benchmarks.{module} {' '.join(rest)}".strip()
    print(f"== {name}: {command}", flush=True)
    with tempfile.TemporaryDirectory() as place:
        made = Path(place) / "result.json"
        asked = [sys.executable, "-m", f"benchmarks.{module}", *rest, "--output", str(made)]
        # Some end with 1 where a limit is missed, which is a result as well.
        subprocess.run(asked, check=False)  # noqa: S603
        if not made.exists():
            print(f"{name}: no result", file=sys.stderr)
            return False
        found = json.loads(made.read_text(encoding="utf-8"))
    found.pop("command", None)
    whole = {**found, "environment": {**environment(), "command": command}}
    (folder / f"{name}.json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    return True


def main() -> int:
    """Runs what was asked for; returns 1 if any left no result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("machine", choices=["cpu", "gpu"])
    parser.add_argument("--only", nargs="*", default=[""], help="files whose name contains a word")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.machine == "gpu" and not torch.cuda.is_available():
        print("there is no CUDA device here", file=sys.stderr)
        return 1
    runs = CPU if options.machine == "cpu" else GPU
    chosen = {name: words for name, words in runs.items() if any(w in name for w in options.only)}
    done = [run(name, words, options.folder) for name, words in chosen.items()]
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main())
