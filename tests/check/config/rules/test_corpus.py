"""Labelled configurations: every fault is found, nothing else is said, and repairs hold."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from nanguard.cli.checking import run_check
from nanguard.cli.commands.before import CheckOptions

CONFIGS = Path(__file__).parents[3] / "configs"
CASES = json.loads((CONFIGS / "labels.json").read_text(encoding="utf-8"))["cases"]


def found(target: Path, *, fix: bool = False, unsafe: bool = False) -> list[dict]:
    report = target.parent / "report.json"
    words = {"fix": fix, "unsafe": unsafe, "no_cache": True, "jobs": 1}
    run_check(CheckOptions((str(target),), form="json", fail_on="none", output=report, **words))
    return json.loads(report.read_text(encoding="utf-8"))["findings"]


def fits(label: dict, finding: dict) -> bool:
    lines = {label.get("line"), *label.get("lines", ())} - {None}
    near = not lines or any(abs((finding["line"] or -9) - line) <= 1 for line in lines)
    files = label.get("file", "")
    ends = (files,) if isinstance(files, str) else tuple(files)
    return finding["name"] == label["rule"] and near and finding["path"].endswith(ends)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["path"])
def test_a_labelled_configuration(case: dict, tmp_path: Path):
    source = CONFIGS / case["path"]
    target = tmp_path / source.name
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copyfile(source, target)
    seen = found(target)
    missed = [lab for lab in case["expected"] if not any(fits(lab, one) for one in seen)]
    false = [
        (one["name"], one["line"])
        for one in seen
        if one["name"] not in case["tolerated"]
        and not any(fits(lab, one) for lab in case["expected"])
    ]
    assert (missed, false) == ([], [])
    if case.get("fix"):
        copy = target.with_name(f"{target.stem}_fixed{target.suffix}")
        wanted = {lab["rule"] for lab in case["expected"] if lab.get("fixable")}
        found(target, fix=True)
        if "misspelled-key" in wanted:  # a key is renamed only by whoever says so
            assert not copy.exists()
            found(target, fix=True, unsafe=True)
        assert target.read_bytes() == source.read_bytes()
        assert wanted & {one["name"] for one in found(copy)} == set()
