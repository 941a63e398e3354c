"""What a recovery loses: a run that is killed at random moments, and one that meets a NaN.

The killed run must end with the weights of the run that nobody killed, and lose no more than the
steps since its last checkpoint. A kill may strike while a checkpoint is being written; then that
one is lost, too, and its steps count as lost, which makes two intervals the bound.

    python -m benchmarks.recovery
    python -m benchmarks.recovery --kills 20 --every 10 --output results.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

_ROOT = Path(__file__).resolve().parents[1]
_SCRIPT = [sys.executable, "-m", "benchmarks.scripts.resumable"]


def run(command: list[str], folder: Path) -> tuple[dict[str, Any], str, float]:
    """Runs a command; returns what the script told at its end, what was said, and the seconds."""
    paths = [str(_ROOT / "src"), str(_ROOT), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    env["OMP_NUM_THREADS"] = "1"
    began = time.perf_counter()
    done = subprocess.run(  # noqa: S603 - a script of ours
        command, cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1]), done.stderr, time.perf_counter() - began


def recovered(folder: Path, options: list[str], arguments: list[str]) -> dict[str, Any]:
    """Runs the script under recovery; returns its end and its attempts."""
    own = [sys.executable, "-m", "nanguard", "run", "--recover", "--no-trace", "--backoff", "0"]
    own += ["--incidents", "found", "--checkpoints", "ckpt/step_*.pt"]
    own += ["--resume-arg", "--resume {checkpoint}", *options, "--"]
    end, _, seconds = run([*own, *_SCRIPT, "--out", "ckpt", *arguments], folder)
    text = (folder / "found" / "lineage.jsonl").read_text()
    return {"end": end, "attempts": list(map(json.loads, text.splitlines())), "seconds": seconds}


def killed(folder: Path, kills: int, every: int, steps: int) -> dict[str, Any]:
    """Measures a run that is killed again and again."""
    arguments = ["--every", str(every), "--steps", str(steps)]
    for name in ("whole", "killed"):
        (folder / name).mkdir()
    whole, _, seconds = run([*_SCRIPT, "--out", "ckpt", *arguments], folder / "whole")
    options = ["--max-restarts", str(kills + 5)]
    told = recovered(folder / "killed", options, [*arguments, "--kills", str(kills)])
    lost = [line["lost"] for line in told["attempts"][:-1]]
    for number, line in enumerate(told["attempts"][:-1], 1):
        print(f"kill {number:2d}: after {line['steps']:3d} steps, {line['lost']:3d} lost")
    return {
        "kills": len(lost),
        "every": every,
        "steps": steps,
        "lost": lost,
        "lost_most": max(lost, default=0),
        "lost_within_interval": sum(count <= every for count in lost),
        "same_weights": told["end"]["weights"] == whole["weights"],
        "seconds_whole": round(seconds, 1),
        "seconds_killed": round(told["seconds"], 1),
    }


def met_nan(folder: Path, every: int, steps: int) -> dict[str, Any]:
    """Measures a run that ends over a batch that holds a NaN."""
    folder.mkdir()
    bad = steps // 2 + every // 2
    arguments = ["--every", str(every), "--steps", str(steps), "--bad", str(bad)]
    options = ["--lr-arg", "--lr {lr}", "--lr", "0.01", "--skip-arg", "--skip {skip}"]
    told = recovered(folder, options, arguments)
    first, second = told["attempts"]
    skipped = second["changes"]["skip"]
    print(f"nan at step {bad}: {first['lost']} steps lost, {skipped} steps of data skipped")
    return {
        "bad_step": bad,
        "every": every,
        "lost": first["lost"],
        "skipped": skipped,
        "within_bound": first["lost"] <= every + skipped,
        "finite": told["end"]["finite"],
        "restart": {"checkpoint": second["checkpoint"], **second["changes"]},
    }


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        result = {
            "machine": platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "killed": killed(Path(place), options.kills, options.every, options.steps),
            "nan": met_nan(Path(place) / "nan", options.every, 100),
        }
    print(json.dumps(result, indent=1))
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
