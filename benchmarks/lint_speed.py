"""How fast ``nanguard check`` reads training code, beside TorchFix, and how its cost grows.

    python -m pip install torchfix
    python -m benchmarks.lint_speed                       # torch's own optimizers and distributions
    python -m benchmarks.lint_speed --tree ~/src/project --torchfix "python -m torchfix"
    python -m benchmarks.lint_speed --no-torchfix --lines 1000000

Both read the same files, one process each, in turns; the ratio of their times is what counts. The
second table copies the tree until it has the wanted number of lines, and shows that time grows
with lines and memory does not.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.recording import write_results

# Parts of torch that are about as large as a training project, and as much about numbers.
PARTS = ("optim", "distributions")


def default_tree(into: Path) -> Path:
    """Copies a part of the installed torch, so that everyone reads the same files."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        sys.exit("lint_speed: torch is not installed; name a folder with --tree")
    for part in PARTS:
        shutil.copytree(Path(spec.origin).parent / part, into / part)
    return into


def python_files(tree: Path) -> list[Path]:
    """Returns the Python files of a folder."""
    return sorted(path for path in tree.rglob("*.py") if path.is_file())


def count(files: list[Path]) -> int:
    """Returns how many lines files have."""
    return sum(path.read_bytes().count(b"\n") for path in files)


def timed(command: list[str]) -> tuple[float, float]:
    """Returns the seconds a command takes, and the most memory it holds, in MB."""
    began = time.perf_counter()
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=quiet, stderr=quiet)  # noqa: S603
    _, _, usage = os.wait4(process.pid, 0)
    process.returncode = 0
    return time.perf_counter() - began, usage.ru_maxrss / 1024


def check(tree: Path) -> list[str]:
    """Returns the command that checks a folder in one process, afresh."""
    options = ["--format", "json", "--fail-on", "none", "--no-cache", "--jobs", "1"]
    return [sys.executable, "-m", "nanguard", "check", *options, str(tree)]


def works(torchfix: list[str]) -> bool:
    """Returns whether TorchFix can be started: one that fails at once would seem quick."""
    words = [*torchfix, "--version"]
    return subprocess.run(words, check=False, capture_output=True).returncode == 0  # noqa: S603


def compare(tree: Path, torchfix: list[str], rounds: int) -> dict[str, float]:
    """Prints the times of both tools, in turns, and returns what came of them."""
    lines = count(python_files(tree))
    print(f"{lines} lines in {len(python_files(tree))} files, {rounds} rounds in turns")
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(timed(check(tree))[0])
        theirs.append(timed([*torchfix, "--select=ALL", str(tree)])[0])
    best, other = min(ours), min(theirs)
    print(f"nanguard check  {best:8.2f} s  {lines / best:9.0f} lines/s")
    print(f"torchfix        {other:8.2f} s  {lines / other:9.0f} lines/s")
    print(f"ratio           {other / best:8.1f}")
    return {"lines": lines, "lines/s": round(lines / best), "times TorchFix": other / best}


def grow(tree: Path, wanted: int) -> list[dict[str, float]]:
    """Prints how time and memory grow with the number of lines, and returns it."""
    rows: list[dict[str, float]] = []
    files = python_files(tree)
    lines = count(files)
    with tempfile.TemporaryDirectory() as folder:
        copies = 0
        print("     lines   seconds   lines/s   memory MB")
        for target in (wanted // 16, wanted // 4, wanted):
            while copies * lines < target:
                shutil.copytree(tree, Path(folder) / f"copy{copies}")
                copies += 1
            seconds, memory = timed(check(Path(folder)))
            total = copies * lines
            print(f"{total:10d}{seconds:10.2f}{total / seconds:10.0f}{memory:12.0f}", flush=True)
            rows.append({"lines": total, "s": round(seconds, 2), "MB": round(memory)})
    return rows


def main() -> None:
    """Reads the arguments and measures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tree", type=Path, help="a folder with training code")
    parser.add_argument("--torchfix", default=f"{sys.executable} -m torchfix")
    parser.add_argument("--no-torchfix", action="store_true")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tree = arguments.tree or default_tree(Path(folder))
        found: dict[str, Any] = {}
        if not arguments.no_torchfix:
            torchfix = shlex.split(arguments.torchfix)
            if not works(torchfix):
                sys.exit("lint_speed: no TorchFix there; install it or leave it out")
            found |= compare(tree, torchfix, arguments.rounds)
        if arguments.lines:
            found["grown"] = grow(tree, arguments.lines)
    if arguments.output:
        write_results(arguments.output, found)


if __name__ == "__main__":
    main()
