"""Runs a check over labelled files: what has to be found is, and nothing else is said."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

from nanguard.cli.checking import run_check
from nanguard.cli.commands.before import CheckOptions

if TYPE_CHECKING:
    from pathlib import Path


def labelled(folder: Path) -> list[dict]:
    """Returns the cases of a folder."""
    return json.loads((folder / "labels.json").read_text(encoding="utf-8"))["cases"]


def judged(folder: Path, case: dict, scratch: Path) -> tuple[list[dict], list[tuple]]:
    """Checks a copy of a case; returns the labels that were missed and the false findings."""
    source = folder / case["path"]
    target = scratch / "run" / source.name
    target.parent.mkdir()
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copyfile(source, target)
    before = _contents(target.parent)
    found = _found(target, scratch / "report.json")
    assert _contents(target.parent) == before
    missed = [label for label in case["expected"] if not any(_fits(label, one) for one in found)]
    known = {label["rule"] for label in case["expected"]} - {label["rule"] for label in missed}
    false = [
        (one["name"], one.get("line"), one["message"])
        for one in found
        if one["name"] not in known | set(case["tolerated"])
    ]
    return missed, false


def _found(target: Path, report: Path) -> list[dict]:
    run_check(
        CheckOptions(
            (str(target),), form="json", fail_on="none", output=report, no_cache=True, jobs=1
        )
    )
    return json.loads(report.read_text(encoding="utf-8"))["findings"]


def _contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _fits(label: dict, finding: dict) -> bool:
    lines = {label.get("line"), *label.get("lines", ())} - {None}
    near = not lines or any(abs((finding.get("line") or -9) - line) <= 1 for line in lines)
    step = label.get("step")
    said = " ".join(str(finding.get(key)) for key in ("step", "message", "where", "path"))
    return (
        finding["name"] == label["rule"]
        and near
        and finding["path"].endswith(label.get("file", ""))
        and (step is None or str(step) in said)
    )
