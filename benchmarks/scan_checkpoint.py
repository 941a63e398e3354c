"""How fast checkpoints are scanned, against torch and against reading, and in how much memory.

    python -m benchmarks.scan_checkpoint [--gb 2] [--memory-gb 8] [--runs 3] [--folder DIR]

Everything is a ratio within one run, with files in the page cache: the scan of a file against
``torch.load`` of the same tensors and ``any(torch.isnan(p).any() ...)``, and against reading the
file once with 1 MiB reads. The aims: 15 times torch, 0.6 of reading, 300 MB for 8 GB.
"""

from __future__ import annotations

import argparse
import json
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

AIM_TORCH, AIM_READING, AIM_MEMORY = 15.0, 0.6, 300.0
TENSORS = 24
TYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}
PEAK = """
import re, sys
from pathlib import Path
import numpy
from nanguard.check.checkpoint.reading import open_sources
from nanguard.check.scanning import Scan
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
before = peak()
assert all(one.good for one in open_sources([Path(sys.argv[1])], Scan()))
print((peak() - before) / 1024)
"""


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
    """Does what field reports do."""
    state = torch.load(path, weights_only=True)
    assert not any(torch.isnan(p).any() for p in state.values())


def by_reading(path: Path) -> None:
    """Reads a file once."""
    with path.open("rb", buffering=0) as file:
        while file.read(1 << 20):
            continue


def by_scan(path: Path) -> None:
    """Scans a file."""
    from nanguard.check.checkpoint.reading import open_sources
    from nanguard.check.scanning import Scan

    assert all(one.good for one in open_sources([path], Scan()))


def seconds(work: Callable[[Path], None], path: Path) -> float:
    """Returns how long something takes."""
    began = time.perf_counter()
    work(path)
    return time.perf_counter() - began


def peak(path: Path) -> float:
    """Returns the memory a scan takes over the start, in MB."""
    command = [sys.executable, "-c", PEAK, str(path)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)  # noqa: S603


def speed(folder: Path, gigabytes: float, runs: int) -> list[dict[str, float | str]]:
    """Returns a row for each format and type."""
    rows: list[dict[str, float | str]] = []
    for dtype in TYPES:
        plain = folder / "model.pt"
        write(plain, gigabytes, dtype)
        loading = min(seconds(by_torch, plain) for _ in range(runs))
        for path in (plain, plain.with_suffix(".safetensors")):
            if path is not plain:
                plain.unlink()
                write(path, gigabytes, dtype)
            size = path.stat().st_size / 1e9
            by_reading(path)
            # In turn, so that whatever else the machine does meets both.
            pairs = [(seconds(by_reading, path), seconds(by_scan, path)) for _ in range(2 * runs)]
            reading, scan = min(one for one, _ in pairs), min(one for _, one in pairs)
            rows.append(
                {
                    "file": f"{str(dtype).removeprefix('torch.')}{path.suffix}",
                    "scan GB/s": round(size / scan, 2),
                    "times torch": round(loading / scan, 1),
                    "of reading": round(reading / scan, 2),
                }
            )
        path.unlink()
    return rows


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--memory-gb", type=float, default=8.0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--folder", default=None)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as place:
        for row in speed(Path(place), args.gb, args.runs):
            print(json.dumps(row))
        path = Path(place) / "large.safetensors"
        write(path, args.memory_gb, torch.float32)
        print(json.dumps({"memory for GB": args.memory_gb, "MB over the start": peak(path)}))


if __name__ == "__main__":
    main()
