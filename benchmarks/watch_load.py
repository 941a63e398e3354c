"""How much of a processor ``nanguard watch`` takes while a log grows fast.

python -m benchmarks.watch_load [--lines 5000] [--seconds 20] [-o FILE]
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import pty
import random
import resource
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path
from typing import Any

LIMIT = 0.15
_FORMS = {
    "text": "step {step}/1000000 | loss {loss:.4f} | grad_norm {norm:.3f} | lr {rate:.3e}\n",
    "jsonl": '{{"step": {step}, "loss": {loss:.6f}, "grad_norm": {norm:.6f}, "lr": {rate:.4e}, '
    '"scale": 65536.0, "time": {time:.3f}}}\n',
}


def write(path: Path, form: str, lines: int, seconds: float) -> int:
    """Writes so many lines a second for a while; returns how many it wrote."""
    rng = random.Random(1)  # noqa: S311 - noise, not a secret
    began = time.monotonic()
    step = 0
    with path.open("a", encoding="utf-8") as file:
        while (now := time.monotonic() - began) < seconds:
            while step < now * lines:
                numbers: dict[str, Any] = {
                    "step": step,
                    "loss": 2 + 6 * math.exp(-step / 20_000) + rng.gauss(0, 0.05),
                    "norm": abs(rng.gauss(1, 0.2)),
                    "rate": 1e-4 * (1 + math.cos(step / 50_000)),
                    "time": time.time(),
                }
                file.write(_FORMS[form].format(**numbers))
                step += 1
            file.flush()
            time.sleep(0.02)
    return step


def drain(descriptor: int, seen: list[int]) -> None:
    """Reads what the view writes to its terminal, and counts it."""
    while True:
        try:
            data = os.read(descriptor, 1 << 16)
        except OSError:
            return
        if not data:
            return
        seen[0] += len(data)


def measure(form: str, lines: int, seconds: float, *, view: bool) -> dict[str, Any]:
    """Returns the share of a processor that the watch took, its start left out."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"train.{'jsonl' if form == 'jsonl' else 'log'}"
        path.touch()
        own, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 160, 0, 0))
        command = [sys.executable, "-m", "nanguard", "watch", str(path)]
        command += [] if view else ["--plain"]
        process = subprocess.Popen(command, stdin=other, stdout=other)  # noqa: S603 - our own
        os.close(other)
        seen = [0]
        threading.Thread(target=drain, args=(own, seen), daemon=True).start()
        time.sleep(2.0)
        before, began, sent = _seconds_of(process.pid), time.monotonic(), seen[0]
        written = write(path, form, lines, seconds)
        used, took = _seconds_of(process.pid) - before, time.monotonic() - began
        sent = seen[0] - sent
        process.terminate()
        process.wait()
        os.close(own)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    return {
        "form": form,
        "view": "160 x 50" if view else "plain",
        "lines a second": round(written / took),
        "share of one core": round(used / took, 4),
        "kB a second to the terminal": round(sent / took / 1000, 2),
        "peak memory, MB": round(peak, 1),
    }


def _seconds_of(pid: int) -> float:
    """Returns the processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measures, prints, and writes down what came out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=5000, help="lines a second")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("-o", "--output", type=Path, help="write the figures to this JSON file")
    asked = parser.parse_args()
    figures = [
        measure(form, asked.lines, asked.seconds, view=view)
        for form, view in (("text", True), ("jsonl", True), ("text", False))
    ]
    for one in figures:
        print(", ".join(f"{name}: {value}" for name, value in one.items()))
    good = all(one["share of one core"] < LIMIT for one in figures)
    print(f"limit: {LIMIT:.0%} of one core: {'kept' if good else 'NOT KEPT'}")
    if asked.output:
        told = {"limit": LIMIT, "kept": good, "figures": figures}
        asked.output.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
