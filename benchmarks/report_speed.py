"""How long the report of a long run takes, how large it is, and how soon it can be used.

python -m benchmarks.report_speed [--steps 1000000] [--keep FOLDER]
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LIMITS = {"written, s": 10.0, "file, MB": 6.0, "interactive, s": 3.0, "zoomed and drawn, s": 0.5}


def make_run(folder: Path, steps: int) -> None:
    """Writes the record of a guarded run: two loss terms, spikes, 2 % of it not finite."""
    rng = random.Random(1)  # noqa: S311 - noise, not a secret
    bad = range(int(0.6 * steps), int(0.62 * steps))
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for step in range(steps):
            loss = 6 * math.exp(-3 * step / steps) + 0.4 + rng.gauss(0, 0.1)
            loss = 50.0 if step == steps // 3 else loss
            told: Any = "nan" if step in bad else loss
            line = {
                "step": step,
                "update": step,
                "epoch": 4 * step // steps,
                "loss": told,
                "terms": {"text": 0.7 * loss, "latent": "inf" if step in bad else 0.3 * loss},
                "grad_norm": told if step in bad else abs(rng.gauss(1, 0.3)),
                "lr": 1e-4 * (0.5 + 0.5 * math.cos(3.1 * step / steps)),
                "scale": 65536.0,
                "action": "skip" if step in bad else "step",
                "time": round(1.7e9 + 0.05 * step, 3),
            }
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
    (folder / "events.jsonl").write_text("", encoding="utf-8")


def write_report(folder: Path, target: Path) -> float:
    """Runs the command as a user does; returns its seconds."""
    command = [sys.executable, "-m", "nanguard", "report", str(folder), "-o", str(target)]
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # noqa: S603 - our own
    return time.perf_counter() - began


def open_report(target: Path) -> tuple[float, float]:
    """Returns how long it takes until the page answers, and how long a zoom takes."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        began = time.perf_counter()
        page.goto(target.as_uri())
        page.wait_for_selector("html[data-ready=true]", state="attached")
        page.evaluate("() => new Promise((r) => requestAnimationFrame(() => setTimeout(r)))")
        ready = time.perf_counter() - began
        began = time.perf_counter()
        page.evaluate("document.querySelector('.toolbar button').click()")
        page.evaluate("() => new Promise((r) => requestAnimationFrame(() => setTimeout(r)))")
        zoomed = time.perf_counter() - began
        browser.close()
    return ready, zoomed


def measure(steps: int, folder: Path) -> dict[str, float]:
    """Returns the figures for a run of so many steps."""
    make_run(folder / "run", steps)
    target = folder / "report.html"
    seconds = write_report(folder / "run", target)
    ready, zoomed = open_report(target)
    return {
        "written, s": seconds,
        "file, MB": target.stat().st_size / 1e6,
        "interactive, s": ready,
        "zoomed and drawn, s": zoomed,
    }


def main() -> None:
    """Prints the figures, and ends with 1 if a limit is not met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--keep", type=Path, help="a folder for the run and its report")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = measure(asked.steps, asked.keep or Path(scratch))
    print(f"a run of {asked.steps} steps, six curves")
    for name, value in found.items():
        print(f"{name:>22}  {value:6.2f}  (limit {LIMITS[name]:g})")
    sys.exit(any(value > LIMITS[name] for name, value in found.items()))


if __name__ == "__main__":
    main()
