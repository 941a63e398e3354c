"""How fast checkpoints are scanned, against torch and against reading, and in how much memory.

    python -m benchmarks.scan_checkpoint [--mb 256 512 2048] [--rounds 7] [--memory-gb 8]
        [--folder DIR] [-o FILE]

Everything is a ratio within one run, with files in the page cache, one way after the other in each
round. ``torch.load(..., weights_only=True)`` and ``isfinite(...).all()`` of every tensor are what
a scan takes the place of; *isnan* is the same with ``isnan``, which looks for less, and *torch
again* the first once more, which says how far the machine can be trusted. *scan* is the scan
alone, *command* the whole of ``nanguard check FILE``, *start* the same command for 1 MB. Ratios
are the quartiles of the rounds' own ratios; *cpu* is processor time of all processes, which other
people's work disturbs less than the clock. The aims: 15 times torch from 256 MB on, 300 MB of
memory for 8 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from benchmarks.recording import write_results
from nanguard.check.checkpoint.checkpoint_reader import open_sources
from nanguard.check.scan import Scan

if TYPE_CHECKING:
    from collections.abc import Callable

TENSORS = 24
TYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}
PEAK = """
import re, sys
from pathlib import Path
import numpy
from nanguard.check.checkpoint.checkpoint_reader import open_sources
from nanguard.check.scan import Scan
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
before = peak()
assert all(one.good for one in open_sources([Path(sys.argv[1])], Scan()))
print((peak() - before) / 1024)
"""


class Cost(NamedTuple):
    """What something takes.

    Attributes:
        wall: Seconds by the clock.
        cpu: Seconds of processor time, of this process and of those it started.
    """

    wall: float
    cpu: float


def write(path: Path, gigabytes: float, dtype: torch.dtype) -> None:
    """Writes a healthy checkpoint.

    Args:
        path: The file; its ending says which format.
        gigabytes: How large it is.
        dtype: The type of its numbers.
    """
    size = torch.empty(0, dtype=dtype).element_size()
    count = int(gigabytes * 1e9 / size / TENSORS) // 1024 * 1024
    one = torch.randn(count).to(dtype)
    if path.suffix == ".pt":
        torch.save({f"layers.{n}.weight": one.clone() for n in range(TENSORS)}, path)
        return
    header = {
        f"layers.{n}.weight": {
            "dtype": TYPES[dtype],
            "shape": [count // 1024, 1024],
            "data_offsets": [n * count * size, (n + 1) * count * size],
        }
        for n in range(TENSORS)
    }
    text = json.dumps(header).encode()
    raw = one.view(torch.uint8).numpy()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _ in range(TENSORS):
            file.write(raw.data)


def by_torch(path: Path) -> None:
    """Loads a file and looks at every tensor."""
    state = torch.load(path, weights_only=True)
    assert all(torch.isfinite(p).all() for p in state.values())


def by_isnan(path: Path) -> None:
    """Loads a file and looks for NaN only."""
    state = torch.load(path, weights_only=True)
    assert not any(torch.isnan(p).any() for p in state.values())


def by_reading(path: Path) -> None:
    """Reads a file once, 1 MiB at a time."""
    buffer = bytearray(1 << 20)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            continue


def by_scan(path: Path) -> None:
    """Scans a file in this process."""
    assert all(one.good for one in open_sources([path], Scan(threads=os.cpu_count() or 1)))


def by_command(path: Path) -> None:
    """Scans a file as a user does."""
    words = ["-m", "nanguard", "check", "--no-cache", "--quiet", str(path)]
    subprocess.run([sys.executable, *words], check=True)  # noqa: S603


def cost(work: Callable[[Path], None], path: Path) -> Cost:
    """Returns what something takes."""
    began, used = time.perf_counter(), _cpu()
    work(path)
    return Cost(time.perf_counter() - began, _cpu() - used)


def _cpu() -> float:
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in both)


def peak(path: Path) -> float:
    """Returns the memory a scan takes over the start, in MB."""
    command = [sys.executable, "-c", PEAK, str(path)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)  # noqa: S603


def compared(place: Path, megabytes: float, dtype: torch.dtype, rounds: int) -> dict[str, object]:
    """Returns how the ways to look at a checkpoint compare."""
    file, same, small = place / "model.pt", place / "model.safetensors", place / "small.pt"
    write(file, megabytes / 1e3, dtype)
    write(same, megabytes / 1e3, dtype)
    write(small, 1e-3, dtype)
    ways: dict[str, tuple[Callable[[Path], None], Path]] = {
        "torch": (by_torch, file),
        "isnan": (by_isnan, file),
        "reading": (by_reading, file),
        "scan": (by_scan, file),
        "safetensors": (by_scan, same),
        "command": (by_command, file),
        "start": (by_command, small),
        "torch again": (by_torch, file),
    }
    for work, path in ways.values():
        work(path)
    costs = [{name: cost(*way) for name, way in ways.items()} for _ in range(rounds)]
    file.unlink()
    same.unlink()
    row: dict[str, object] = {"file": f"{str(dtype).removeprefix('torch.')} {megabytes:g} MB"}
    for kind in Cost._fields:
        took = [{name: getattr(one, kind) for name, one in each.items()} for each in costs]
        for name in ("scan", "safetensors", "command", "torch again"):
            row[f"torch / {name}, {kind}"] = _spread([one["torch"] / one[name] for one in took])
        row[f"isnan / scan, {kind}"] = _spread([one["isnan"] / one["scan"] for one in took])
        row[f"scan / reading, {kind}"] = _spread([one["scan"] / one["reading"] for one in took])
        row[f"start, {kind} s"] = round(statistics.median(one["start"] for one in took), 3)
    row["scan GB/s"] = round(megabytes / 1e3 / statistics.median(c["scan"].wall for c in costs), 2)
    return row


def _spread(ratios: list[float]) -> list[float]:
    """Returns the lower quartile, the median and the upper quartile."""
    return [round(one, 2) for one in statistics.quantiles(ratios, n=4)]


def main() -> None:
    """Measures and prints a row for each size and type."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=float, nargs="*", default=[256.0, 512.0, 2048.0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--memory-gb", type=float, default=8.0)
    parser.add_argument("--folder", default=None)
    parser.add_argument("-o", "--output", type=Path, default=None)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(dir=args.folder) as place:
        for megabytes in args.mb:
            for dtype in TYPES:
                rows.append(compared(Path(place), megabytes, dtype, args.rounds))
                print(json.dumps(rows[-1]), flush=True)
        if args.memory_gb:
            path = Path(place) / "large.safetensors"
            write(path, args.memory_gb, torch.float32)
            rows.append({"file": f"float32 {args.memory_gb:g} GB", "memory, MB": peak(path)})
            print(json.dumps(rows[-1]))
    if args.output:
        write_results(args.output, rows)


if __name__ == "__main__":
    main()
