"""What nanguard serve costs over many long runs: time, memory, and a processor when idle.

python -m benchmarks.serve_load [--runs 200] [--steps 100000] [--scale 1] [--links] [-o FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

LIMITS = {
    "started, s": 1.0,
    "overview once indexed, s": 2.0,
    "largest memory, MB": 500.0,
    "idle, % of a core": 2.0,
}
_IDLE = 10.0
_PATIENCE = 1800.0


def make_runs(root: Path, runs: int, steps: int, *, links: bool) -> None:
    """Writes run folders of the guard; all but the first are copies of it, or links to it."""
    rng = random.Random(1)  # noqa: S311 - noise, not a secret
    first = root / "sweep-0" / "run-000"
    first.mkdir(parents=True)
    with (first / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for step in range(steps):
            loss: Any = 6 * math.exp(-3 * step / steps) + 0.4 + rng.gauss(0, 0.1)
            line = {
                "step": step,
                "update": step,
                "epoch": 4 * step // steps,
                "loss": "nan" if step == steps // 2 else loss,
                "terms": {"text": 0.7 * loss, "latent": 0.3 * loss},
                "grad_norm": abs(rng.gauss(1, 0.3)),
                "lr": 1e-4,
                "scale": 65536.0,
                "action": "step",
                "time": round(1.7e9 + 0.05 * step, 3),
            }
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
    (first / "events.jsonl").touch()
    for number in range(1, runs):
        folder = root / f"sweep-{number // 20}" / f"run-{number:03d}"
        folder.mkdir(parents=True)
        (folder / "events.jsonl").touch()
        put = os.link if links else shutil.copyfile
        put(first / "metrics.jsonl", folder / "metrics.jsonl")
    for path in root.rglob("*.jsonl"):
        # Written long ago: a run that still grows is looked at more often.
        os.utime(path, (1.7e9, 1.7e9))


def get(address: str) -> str:
    """Returns a page."""
    with urllib.request.urlopen(address) as answer:  # noqa: S310 - our own
        return str(answer.read().decode())


def memory(pid: int) -> float:
    """Returns the largest memory a process had, in MB."""
    told = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    found = re.search(r"VmHWM:\s+(\d+)", told)
    return int(found.group(1)) / 1024 if found else math.nan


def busy(pid: int) -> float:
    """Returns how many seconds of a processor a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def until_indexed(address: str, runs: int) -> None:
    """Waits until every run was read."""
    until = time.perf_counter() + _PATIENCE
    while time.perf_counter() < until:
        page = get(address)
        if f"{runs} runs:" in page and "still to be read" not in page:
            return
        time.sleep(0.5)
    raise SystemExit(f"not indexed within {_PATIENCE:g} s")


def measure(root: Path, runs: int) -> dict[str, float]:
    """Returns the figures for a folder of runs."""
    command = [sys.executable, "-m", "nanguard", "serve", str(root), "--port", "0"]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found is not None
        address = found.group()
        figures = {"started, s": time.perf_counter() - began}
        began = time.perf_counter()
        get(address)
        figures["first overview, s"] = time.perf_counter() - began
        until_indexed(address, runs)
        figures["indexed, s"] = time.perf_counter() - began
        figures |= _after_indexing(process, address)
        process.send_signal(signal.SIGINT)
        began = time.perf_counter()
        process.wait()
        figures["ended, s"] = time.perf_counter() - began
    return figures


def _after_indexing(process: subprocess.Popen[str], address: str) -> dict[str, float]:
    began = time.perf_counter()
    page = get(address)
    figures = {"overview once indexed, s": time.perf_counter() - began}
    figures["overview, MB"] = len(page) / 1e6
    used = busy(process.pid)
    time.sleep(_IDLE)
    figures["idle, % of a core"] = 100 * (busy(process.pid) - used) / _IDLE
    for place in re.findall(r'href="/(run/\w+)"', page)[:12]:
        began = time.perf_counter()
        get(address + place)
        figures["a run's page, s"] = time.perf_counter() - began
    figures["largest memory, MB"] = memory(process.pid)
    return figures


def main() -> None:
    """Prints the figures, and ends with 1 if a limit is not met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--scale", type=float, default=1.0, help="of both, for a quick look")
    parser.add_argument("--links", action="store_true", help="hard links instead of copies")
    parser.add_argument("-o", "--output", type=Path, help="write the figures as JSON")
    asked = parser.parse_args()
    runs, steps = max(2, int(asked.runs * asked.scale)), max(100, int(asked.steps * asked.scale))
    with tempfile.TemporaryDirectory() as scratch:
        make_runs(Path(scratch), runs, steps, links=asked.links)
        figures = measure(Path(scratch), runs)
    print(f"{runs} runs of {steps} steps, six curves each")
    for name, value in figures.items():
        limit = f"  (limit {LIMITS[name]:g})" if name in LIMITS else ""
        print(f"{name:>26}  {value:8.2f}{limit}")
    if asked.output:
        told = {"runs": runs, "steps": steps, **{key: round(v, 3) for key, v in figures.items()}}
        asked.output.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    sys.exit(any(figures[name] > limit for name, limit in LIMITS.items()))


if __name__ == "__main__":
    main()
