"""The stories of the example systems at a realistic size, on a GPU or here.

    python -m benchmarks.systems token_image_diffusion mmdit_language --size full -o out.json

Each system is run as its team had it, under ``nanguard run``, and repaired; the result says where
it broke, what was said about it, and how the repaired run ended.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from examples.story import NAMES, Ended, Story, fall

_TAIL = 1500


def measure(name: str, size: str, more: dict[str, str], broken: dict[str, str]) -> dict[str, Any]:
    """Tells the story of one system at a size; returns its figures."""
    with tempfile.TemporaryDirectory() as scratch:
        story = Story.of(name, Path(scratch, name))
        sets = {**(story.told.get(size) or {}), **more}
        row: dict[str, Any] = {"system": name, "size": size, "set": sets, "broken by": broken}
        broken = {**sets, **broken}
        row["plain"] = _timed(story, story.command("plain", broken), "plain")
        began = time.perf_counter()
        ended = story.guarded(story.command("guarded", broken), "incidents")
        row["guarded"] = _figures(story, ended, "guarded", time.perf_counter() - began)
        row["incident"] = _said(story.incident("incidents"))
        row["not as expected"] = story.missing(
            {k: v for k, v in story.told["main"]["expect"].items() if k != "step"},
            story.incident("incidents"),
        )
        fixed = story.repaired()
        repaired = {**sets, **(story.told.get("repair_set") or {})}
        row["repaired"] = _timed(
            story, story.command("repaired", repaired, config=fixed), "repaired"
        )
        return row


def _timed(story: Story, words: list[str], out: str) -> dict[str, Any]:
    began = time.perf_counter()
    return _figures(story, story.run(words), out, time.perf_counter() - began)


def _figures(story: Story, ended: Ended, out: str, seconds: float) -> dict[str, Any]:
    steps, losses = story.curve(out)
    bad = [step for step, loss in zip(steps, losses, strict=True) if not math.isfinite(loss)]
    share = fall(losses)
    figures: dict[str, Any] = {
        "exit": ended.code,
        "seconds": round(seconds, 1),
        "points": len(losses),
        "first not finite": bad[0] if bad else None,
        "not finite": len(bad),
        "ends at": None if math.isnan(share) else round(share, 4),
        "said": [
            line
            for line in ended.output.splitlines()
            if "M parameters" in line or "nanguard" in line
        ][:6],
    }
    if ended.code not in (0, 3) or not losses:
        figures["tail"] = ended.output[-_TAIL:]
    return figures


def _said(incident: dict[str, Any] | None) -> dict[str, Any] | None:
    if incident is None:
        return None
    keep = ("step", "symptom", "origin", "cause", "replay")
    fixes = [
        {key: fix.get(key) for key in ("summary", "verified", "how")}
        for fix in incident.get("fixes", [])[:3]
    ]
    return {**{key: incident.get(key) for key in keep}, "fixes": fixes}


def main() -> None:
    """Measures the named systems."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--size", default="tiny", help="a key of story.yaml: tiny or full")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument(
        "--broken-set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="for the runs that break only, where a large model needs less to break",
    )
    parser.add_argument("--output", "-o", type=Path)
    args = parser.parse_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    result: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks.systems", *sys.argv[1:]]),
        "device": device,
        "torch": torch.__version__,
        "systems": [],
    }
    for name in args.names:
        more, broken = (
            dict(one.split("=", 1) for one in given) for given in (args.set, args.broken_set)
        )
        result["systems"].append(measure(name, args.size, more, broken))
        print(json.dumps(result["systems"][-1], indent=1))
        if args.output:
            args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
