"""How long ``nanguard check one.yaml`` takes from a cold start, against ``import yaml``.

    python -m benchmarks.check_cold [--runs 30] [-o FILE]

Both are processes of their own, in turn, in one run: the ratio of the medians is the result, and
the spread of the single ratios is told beside it. The aim is a ratio of at most 6.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.recording import write_results

AIM = 6.0
CONFIG = """\
# A run that could be anybody's.
model_name_or_path: gpt2
output_dir: out
learning_rate: 0.0003
optim: adamw_torch
per_device_train_batch_size: 8
gradient_accumulation_steps: 4
num_train_epochs: 3
warmup_ratio: 0.03
max_grad_norm: 1.0
bf16: true
save_steps: 500
"""


def seconds(command: list[str]) -> float:
    """Returns how long a command takes; it has to succeed."""
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)  # noqa: S603
    return time.perf_counter() - began


def main() -> None:
    """Measures and prints one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("-o", "--output", type=Path)
    chosen = parser.parse_args()
    runs = chosen.runs
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "one.yaml"
        file.write_text(CONFIG, encoding="utf-8")
        yaml = [sys.executable, "-c", "import yaml"]
        check = [sys.executable, "-m", "nanguard", "check", str(file)]
        seconds(yaml)
        seconds(check)
        pairs = [(seconds(yaml), seconds(check)) for _ in range(runs)]
    base = statistics.median(pair[0] for pair in pairs)
    ours = statistics.median(pair[1] for pair in pairs)
    ratios = sorted(pair[1] / pair[0] for pair in pairs)
    low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
    print(
        f"nanguard check one.yaml {1000 * ours:.0f} ms, import yaml {1000 * base:.0f} ms: "
        f"{ours / base:.2f} x (80 % of the pairs: {low:.2f} to {high:.2f}; aim {AIM:.0f})"
    )
    if chosen.output:
        found = {"check_ms": 1000 * ours, "import_yaml_ms": 1000 * base, "ratio": ours / base}
        write_results(chosen.output, {name: round(value, 2) for name, value in found.items()})
    sys.exit(0 if ours <= AIM * base else 1)


if __name__ == "__main__":
    main()
