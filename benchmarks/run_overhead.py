"""What ``nanguard run`` costs a healthy script: per step, and at the start.

The script runs plainly and under ``nanguard run``, in turns, each time in a new process. The ratio
compares the medians over all blocks of steps. Where a machine has cores to spare, both run at the
same time on cores of their own, which they swap after each round: what disturbs one disturbs the
other.

    python -m benchmarks.run_overhead
    python -m benchmarks.run_overhead --blocks 180 --rounds 4 --side-by-side 4
    python -m benchmarks.run_overhead --device cuda --rounds 3 --output results.json
    python -m benchmarks.run_overhead --device cuda --launch-bound --block 100
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

_ROOT = Path(__file__).resolve().parents[1]


def run(
    guarded: bool,  # noqa: FBT001
    arguments: list[str],
    folder: str,
    cores: Collection[int] = (),
) -> tuple[str, float]:
    """Runs a Python command, on some cores only; returns what it printed and how long it took."""
    command = [sys.executable, *arguments]
    if guarded:
        incidents = str(Path(folder, "incidents"))
        command = [
            sys.executable,
            "-m",
            "nanguard",
            "run",
            "--quiet",
            "--incidents",
            incidents,
            "--",
            *command,
        ]
    paths = [str(_ROOT / "src"), str(_ROOT), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    # What is installed is compiled: so is what is measured, after its first run.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    if cores:
        env["OMP_NUM_THREADS"] = str(len(cores))
        command = ["taskset", "--cpu-list", ",".join(map(str, cores)), *command]
    began = time.perf_counter()
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)  # noqa: S603
    assert done.stderr.count("nanguard:") == done.stderr.count("none bad"), done.stderr
    return done.stdout, time.perf_counter() - began


def turns(rounds: int) -> Iterator[tuple[bool, str]]:
    """Yields whether a turn is guarded, and a folder: without and with, in changing order."""
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(rounds):
            for guarded in (False, True) if turn % 2 == 0 else (True, False):
                yield guarded, folder


def last_line(out: str) -> dict[str, Any]:
    """Returns what a script says about itself at its end."""
    said: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return said


def machine(device: str) -> dict[str, str]:
    """Returns what a result was measured with."""
    cuda = device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or "cpu",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": " ".join(["python -m", *_without_output(sys.orig_argv[2:])]),
    }


def _without_output(words: list[str]) -> list[str]:
    """Returns a command without the file that its result goes to."""
    if "--output" not in words:
        return words
    place = words.index("--output")
    return words[:place] + words[place + 2 :]


def show(result: dict[str, Any], output: Path | None) -> None:
    """Prints a result, and writes it if that is wanted."""
    print(json.dumps(result, indent=1))
    if output:
        output.write_text(json.dumps(result, indent=1) + "\n")


def measure(device: str, rounds: int, script: list[str], beside: int = 0) -> dict[str, Any]:
    """Measures steps and start; with as many cores for each side by side, if that is asked."""
    script = ["-m", "benchmarks.scripts.gpt", "--device", device, *script]
    steps: dict[bool, list[float]] = {False: [], True: []}
    starts: dict[bool, list[float]] = {False: [], True: []}
    losses, rounds_ratios = set(), []
    for turn in _pairs(script, rounds, beside) if beside else _turns(script, rounds):
        for guarded, said, start in turn:
            steps[guarded] += said["ms"]
            losses.add(said["loss"])
            starts[guarded].append(start)
        rounds_ratios.append(_ratio({guarded: said["ms"] for guarded, said, _ in turn}))
    plain, watched = statistics.median(steps[False]), statistics.median(steps[True])
    return {
        **machine(device),
        "ms_plain": round(plain, 3),
        "ms_run": round(watched, 3),
        "ratio": round(watched / plain, 4),
        "ratio_of_each_round": rounds_ratios,
        "spread_plain": [round(min(steps[False]), 3), round(max(steps[False]), 3)],
        "spread_run": [round(min(steps[True]), 3), round(max(steps[True]), 3)],
        "start_seconds": round(
            statistics.median(starts[True]) - statistics.median(starts[False]), 3
        ),
        "same_loss": len(losses) == 1,
    }


_Turn = tuple[bool, dict[str, Any], float]
"""Whether it was guarded, what the script said of itself, and how long ``import torch`` took."""


def _turns(script: list[str], rounds: int) -> Iterator[list[_Turn]]:
    """Yields what each round says, one after the other."""
    done: list[_Turn] = []
    for guarded, folder in turns(rounds):
        said = last_line(run(guarded, script, folder)[0])
        done.append((guarded, said, run(guarded, ["-c", "import torch"], folder)[1]))
        if len(done) == 2:
            yield done
            done = []


def _pairs(script: list[str], rounds: int, count: int) -> Iterator[list[_Turn]]:
    """Yields what each round says, both sides at the same time on cores of their own."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2 * count:
        sys.exit(f"{count} cores for each of two need {2 * count}; there are {len(cores)}.")
    halves = (cores[:count], cores[count : 2 * count])
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as both:
        for turn in range(rounds):
            places = dict(
                zip((False, True), halves if turn % 2 == 0 else halves[::-1], strict=True)
            )
            side = partial(_side, script, folder)
            yield list(both.map(side, places, places.values()))


def _side(script: list[str], folder: str, guarded: bool, cores: list[int]) -> _Turn:  # noqa: FBT001
    said = last_line(run(guarded, script, folder, cores)[0])
    return guarded, said, run(guarded, ["-c", "import torch"], folder, cores)[1]


def _ratio(ms: dict[bool, list[float]]) -> float:
    return round(statistics.median(ms[True]) / statistics.median(ms[False]), 4)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--block", type=int, default=20)
    parser.add_argument("--launch-bound", action="store_true", help="few tokens a step, on CUDA")
    parser.add_argument(
        "--side-by-side", type=int, default=0, metavar="CORES", help="cores for each of the two"
    )
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    script = ["--blocks", str(args.blocks), "--block", str(args.block)]
    script += ["--launch-bound"] * args.launch_bound
    show(measure(args.device, args.rounds, script, args.side_by_side), args.output)


if __name__ == "__main__":
    main()
