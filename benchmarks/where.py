"""One fault, many ways to train: is each bad step explained in place, and the run left alone?

Each script of ``tests/where`` runs three times: plainly, under ``nanguard run``, and under
``nanguard run --no-trace``. What is compared: whether the first incident names the line and the
cause, how it was replayed, how long that took, and whether everything the script printed after the
explanation is what it prints when nothing is explained.

    python -m benchmarks.where                         # late by 70 s: beyond any second run
    python -m benchmarks.where --late 0 fused lightning
    python -m benchmarks.where --device cuda --jobs 10 --output results.json
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.where import cells

# What a trainer prints about its own speed is different each time.
_SPEED = re.compile(r"'train_(runtime|samples_per_second|steps_per_second)': '?[\d.]+'?")


def run(folder: Path, argv: list[str], env: dict[str, str], *options: str) -> tuple[int, str, str]:
    """Runs a script, under the guard if there are options; returns code, output and errors."""
    guard = [sys.executable, "-m", "nanguard", "run", *options, "--"] if options else []
    done = subprocess.run(  # noqa: S603 - our own scripts
        [*guard, sys.executable, *argv],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    return done.returncode, _SPEED.sub("", done.stdout), done.stderr


def measure(name: str, label: dict[str, Any], device: str, text: str, late: int) -> dict[str, Any]:
    """Runs one way to train; returns what became of it."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    if device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / label["file"]).write_text(text)
        quick = {**env, "NO_LATE": "1"}
        _, plain, _ = run(folder, label["argv"], quick)
        _, untraced, _ = run(folder, label["argv"], quick, "--no-trace", "--incidents", "other")
        code, traced, errors = run(folder, label["argv"], env, "--incidents", "found")
        found = [json.loads(p.read_text()) for p in sorted(folder.glob("found/*/incident.json"))]
    first: dict[str, Any] = min(found, key=lambda incident: incident["step"], default={})
    origin, cause, replay = (first.get(key) or {} for key in ("origin", "cause", "replay"))
    took = _step_seconds(first)
    return {
        "name": name,
        "code": code,
        "line": origin.get("line") == label["line"],
        "phase": origin.get("phase") == label["phase"],
        "cause": cause.get("code") in label["causes"],
        "wrong": cause.get("code") not in (None, "unknown", *label["causes"]),
        "method": replay.get("method"),
        "verified": any(fix["verified"] for fix in first.get("fixes", [])),
        "seconds": replay.get("seconds"),
        "step_seconds": took,
        "same_as_untraced": traced == untraced,
        "last_line": _last(traced)[:2] == _last(plain)[:2],
        "incidents": len(found),
        "errors": "" if found else errors[-500:],
        "late": late,
    }


def _step_seconds(incident: dict[str, Any]) -> float | None:
    run_ = incident.get("run") or {}
    return run_.get("step_seconds") if isinstance(run_.get("step_seconds"), float) else None


def _last(text: str) -> list[str]:
    lines = [line for line in text.splitlines() if line.startswith("done")]
    return lines[-1].split() if lines else []


def main() -> None:
    """Measures all ways, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--late", type=int, default=70, help="seconds before the fault")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        labels = cells.write(scratch, asked.late, asked.device)
        texts = {name: Path(scratch, label["file"]).read_text() for name, label in labels.items()}
    names = [name for name in labels if not asked.names or name in asked.names]

    def one(name: str) -> dict[str, Any]:
        return measure(name, labels[name], asked.device, texts[name], asked.late)

    with ThreadPoolExecutor(asked.jobs) as pool:
        rows = []
        for row in pool.map(one, names):
            rows.append(row)
            good = row["line"] and row["cause"]
            rest = "" if row["same_as_untraced"] else "; THE REST OF THE RUN DIFFERS"
            print(
                f"{row['name']:17s} {'explained' if good else 'NOT EXPLAINED'} ({row['method']}, "
                f"{row['seconds']} s){rest}{row['errors']}",
                flush=True,
            )
    seconds = [row["seconds"] for row in rows if row["seconds"] is not None]
    limits = [30 * row["step_seconds"] + 2 for row in rows if row["step_seconds"] is not None]
    summary = {
        "explained": f"{sum(row['line'] and row['cause'] for row in rows)}/{len(rows)}",
        "in place": f"{sum(row['method'] == 'in-place' for row in rows)}/{len(rows)}",
        "wrong verdicts": sum(row["wrong"] for row in rows),
        "fix verified": f"{sum(row['verified'] for row in rows)}/{len(rows)}",
        "rest of the run identical": f"{sum(row['same_as_untraced'] for row in rows)}/{len(rows)}",
        "last line as in the plain run": f"{sum(row['last_line'] for row in rows)}/{len(rows)}",
        "median seconds to the cause": statistics.median(seconds) if seconds else None,
        "median of 30 steps and 2 s": round(statistics.median(limits), 3) if limits else None,
    }
    print(json.dumps(summary, indent=1))
    if asked.output is not None:
        asked.output.write_text(json.dumps({"summary": summary, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
