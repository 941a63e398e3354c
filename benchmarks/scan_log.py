"""How fast logs are scanned, against a Python loop over lines with a regular expression.

python -m benchmarks.scan_log [--lines 1000000] [--memory-lines 5000000] [-o FILE]
"""

from __future__ import annotations

import argparse
import math
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.recording import write_results

_PAIR = re.compile(r"([A-Za-z_][\w/]*)\s*[=:]\s*([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf))")
_ONE = re.compile(r"step=(\d+).*?loss=(\S+)")


def make_log(path: Path, lines: int) -> None:
    """Writes the text log of a language model, with one loss that is NaN near its end."""
    rng = random.Random(1)  # noqa: S311 - noise, not a secret
    bad = int(0.9 * lines)
    with path.open("w", encoding="utf-8") as file:
        for i in range(lines):
            loss = math.nan if i == bad else 2 + 8 * math.exp(-i / 3e4) + rng.gauss(0, 0.05)
            file.write(
                f"2025-03-12 09:{i // 60 % 60:02d}:{i % 60:02d} step={i * 10} loss={loss:.4f} "
                f"ppl={rng.random() * 10:.2f} grad_norm={0.8 + rng.random() * 0.2:.3f} "
                "lr=3.0e-04 tok/s=41233\n"
            )


def loop_over_pairs(path: Path) -> int:
    """Reads every pair of a log with one regular expression per line, as scripts do."""
    bad = 0
    with path.open(encoding="utf-8") as file:
        for line in file:
            pairs = {key: float(value) for key, value in _PAIR.findall(line)}
            loss, norm = pairs.get("loss", 0.0), pairs.get("grad_norm", 0.0)
            bad += not (math.isfinite(loss) and math.isfinite(norm))
    return bad


def loop_over_losses(path: Path) -> int:
    """Reads only the step and the loss of a log, the least a script can do."""
    bad = 0
    with path.open(encoding="utf-8") as file:
        for line in file:
            found = _ONE.search(line)
            if found:
                bad += not math.isfinite(float(found[2]))
    return bad


def scan(path: Path) -> list[str]:
    """Reads a log and judges it by every rule; returns the names of what was found."""
    from nanguard.check.log.log_reader import open_sources
    from nanguard.check.rule import rules_for
    from nanguard.check.scan import Scan

    logs = open_sources([path], Scan())
    return [f.name for log in logs for rule in rules_for("log") for f in rule.check(log)]


def seconds(work: object, path: Path) -> tuple[float, object]:
    """Returns how long a function takes, and what it returns."""
    begin = time.perf_counter()
    result = work(path)  # type: ignore[operator]
    return time.perf_counter() - begin, result


def speed(path: Path) -> dict[str, float]:
    """Returns the times of the scan and of the loops, and their ratios, best of three each."""
    times = {
        work.__name__: min(seconds(work, path)[0] for _ in range(3))
        for work in (scan, loop_over_pairs, loop_over_losses)
    }
    times["times faster than all pairs"] = times["loop_over_pairs"] / times["scan"]
    times["times faster than the loss alone"] = times["loop_over_losses"] / times["scan"]
    return times


def memory(path: Path) -> float:
    """Returns by how many MiB a scan in a process of its own grows beyond its start."""
    code = "import sys; from benchmarks.scan_log import Path, grown; grown(Path(sys.argv[1]))"
    done = subprocess.run(  # noqa: S603 - our own interpreter
        [sys.executable, "-c", code, str(path)], check=True, capture_output=True, text=True
    )
    return float(done.stdout.split()[-1])


def grown(path: Path) -> None:
    """Scans a file and prints the growth of this process in MiB."""
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    scan(path)
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) / 1024)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--memory-lines", type=int, default=5_000_000)
    parser.add_argument("-o", "--output", type=Path)
    chosen = parser.parse_args()
    rows: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.log"
        make_log(path, chosen.lines)
        print(f"{chosen.lines} lines, {path.stat().st_size / 2**20:.0f} MiB")
        rows.append({name: round(value, 3) for name, value in speed(path).items()})
        for name, value in rows[0].items():
            print(f"  {name:34s} {value:8.2f}", flush=True)
        if chosen.memory_lines:
            make_log(path, chosen.memory_lines)
            rows.append({"lines": chosen.memory_lines, "grown_MiB": round(memory(path))})
            print(f"{chosen.memory_lines} lines: {rows[1]['grown_MiB']} MiB over the start")
    if chosen.output:
        write_results(chosen.output, rows)


if __name__ == "__main__":
    main()
