"""Findings a project knows already."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.check.plugin import check, names, told

if TYPE_CHECKING:
    from pathlib import Path


def test_only_new_findings_count(tmp_path: Path, plugin: Path):
    file = tmp_path / "src" / "a.py"
    file.parent.mkdir()
    file.write_text("x = BAD\ny = BAD\nx = BAD\n")
    done = check("src", "--write-baseline", "known.json", cwd=tmp_path, plugin=plugin)
    assert (done.returncode, done.stdout) == (0, "3 findings are now known: known.json\n")
    entries = json.loads((tmp_path / "known.json").read_text())["findings"]
    assert entries[0] == {"path": "src/a.py", "name": "bad-word", "text": "x = BAD", "count": 2}

    file.write_text("# moved\n\n\nx   =  BAD\ny = BAD\nx = BAD\nx = BAD\n")
    report = told("src", "--baseline", "known.json", cwd=tmp_path, plugin=plugin)
    assert names(report) == [("bad-word", 7)]
    assert report["baseline"] == {"known": 3, "stale": []}


def test_entries_of_what_was_repaired_are_stale(tmp_path: Path, plugin: Path):
    (tmp_path / "a.py").write_text("x = BAD\n")
    (tmp_path / "b.py").write_text("x = BAD\n")
    check(".", "--write-baseline", "known.json", cwd=tmp_path, plugin=plugin)
    (tmp_path / "a.py").write_text("x = 1\n")
    done = check("a.py", "--baseline", "known.json", cwd=tmp_path, plugin=plugin)
    assert done.returncode == 0
    assert "stale in the baseline: a.py: bad-word: x = BAD\n" in done.stdout
    assert "b.py" not in done.stdout
    words = ("a.py", "--baseline", "known.json", "--ignore", "bad-word")
    assert "stale" not in check(*words, cwd=tmp_path, plugin=plugin).stdout
    (tmp_path / "b.py").unlink()
    done = check("a.py", "--baseline", "known.json", cwd=tmp_path, plugin=plugin)
    assert "stale in the baseline: b.py" in done.stdout


@pytest.mark.parametrize("content", ["", "[]", '{"schema": "nanguard.baseline/1"}', "[" * 99999])
def test_a_broken_baseline_is_exit_code_2(tmp_path: Path, content: str):
    (tmp_path / "known.json").write_text(content)
    (tmp_path / "a.py").write_text("x = 1\n")
    done = check("a.py", "--baseline", "known.json", cwd=tmp_path)
    assert done.returncode == 2
    assert "the baseline cannot be read" in done.stderr
