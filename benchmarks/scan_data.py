"""How fast JSON lines are scanned for bad labels, against a loop over ``json.loads``.

    python -m benchmarks.scan_data [--lines 2000000] [--memory-lines 10000000] [-o FILE]

Both read the same file, which is in the page cache, in one run; the ratio counts, not the seconds.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.recording import write_results
from nanguard.check.data.data_reader import read_request
from nanguard.check.data.dataset import Request
from nanguard.check.scan import Expected, Scan

GROUPS = {"food101": 101, "food172": 172, "veg200": 200}


def write_labels(path: Path, lines: int) -> None:
    """Writes a file of labelled images of three data sets."""
    rng = random.Random(0)  # noqa: S311
    names = list(GROUPS.items())
    with path.open("w", encoding="utf-8") as file:
        for at in range(lines):
            name, classes = names[at % 3]
            file.write(
                f'{{"image": "/mnt/{name}/{at:06d}.jpg", "text": "dish no. {at}", '
                f'"label": {rng.randrange(classes)}, "dataset_name": "{name}"}}\n'
            )


def loop(path: Path) -> tuple[int, int, int]:
    """Reads labels as scripts do: the smallest, the largest, and how many there are."""
    low, high, seen = 10**9, -(10**9), set()
    with path.open(encoding="utf-8") as file:
        for line in file:
            label = json.loads(line)["label"]
            low, high = min(low, label), max(high, label)
            seen.add(label)
    return low, high, len(seen)


def scan(path: Path, threads: int = 2) -> tuple[int, int, int]:
    """Reads the same file as nanguard does, each data set against its own classes."""
    request = Request((path,), Expected(groups=GROUPS))
    (file,) = read_request(request, Scan(threads=threads)).files
    assert file.ledger.labels is not None
    numbers = file.ledger.labels.numbers(every=True)
    return min(numbers), max(numbers), len(numbers)


def speed(lines: int, times: int = 3) -> dict[str, float]:
    """Returns the seconds of the loop and of the scan, and their ratio."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "labels.jsonl"
        write_labels(path, lines)
        scan(path)
        slow, fast, looped, used = [], [], [], []
        for _ in range(times):
            start, first = time.perf_counter(), time.process_time()
            expected = loop(path)
            middle, spent = time.perf_counter(), time.process_time()
            assert scan(path) == expected
            slow.append(middle - start)
            fast.append(time.perf_counter() - middle)
            looped.append(spent - first)
            used.append(time.process_time() - spent)
        size = path.stat().st_size
    return {
        "lines": lines,
        "loop_s": min(slow),
        "scan_s": min(fast),
        "ratio": min(slow) / min(fast),
        # On a busy machine these two say more; the scan takes two cores where they are idle.
        "loop_cpu_s": min(looped),
        "scan_cpu_s": min(used),
        "ratio_cpu": min(looped) / min(used),
        "scan_MB_per_s": size / min(fast) / 1e6,
    }


def memory(lines: int) -> float:
    """Returns by how many megabytes a process grows that scans a file of so many lines."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "labels.jsonl"
        write_labels(path, lines)
        command = [sys.executable, "-m", "benchmarks.scan_data", "--grown", str(path)]
        out = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603
    return float(out.stdout)


def grown(path: Path) -> float:
    """Returns by how many megabytes this process grows while it scans a file."""
    before = _peak()
    scan(path)
    return _peak() - before


def _peak() -> float:
    """Returns the peak of this process; what ``getrusage`` says may be its parent's."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return float(line.split()[1]) / 1e3
    return 0.0


def main() -> None:
    """Prints speed and memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=2_000_000)
    parser.add_argument("--memory-lines", type=int, default=10_000_000)
    parser.add_argument("--grown", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    if options.grown:
        print(grown(options.grown))
        return
    rows = []
    for lines in (options.lines // 4, options.lines):
        rows.append({key: round(value, 3) for key, value in speed(lines).items()})
        print(rows[-1], flush=True)
    rows.append({"lines": options.memory_lines, "grown_MB": memory(options.memory_lines)})
    print(rows[-1])
    if options.output:
        write_results(options.output, rows)


if __name__ == "__main__":
    main()
