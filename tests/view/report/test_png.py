"""The plain picture of the curves."""

from __future__ import annotations

import subprocess
import sys

import pytest

from nanguard.view.report.png import picture
from nanguard.view.report.verdict import judge
from nanguard.view.runs import open_runs
from tests.view.runs.runs import write_incident, write_record

pytest.importorskip("matplotlib", reason="the picture is drawn by matplotlib")


def drawn(*paths, title=None):
    runs = open_runs(paths)
    for run in runs:
        judge(run)
    data = picture(runs, title)
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def test_picture_of_runs(tmp_path):
    one = write_record(tmp_path / "a")
    write_incident(one / "incidents", 40)
    width, height = drawn(one)
    assert width == 1300
    assert drawn(one, write_record(tmp_path / "b $x_1$"), title="$\\frac{")[0] == 1300
    (tmp_path / "empty.log").write_text("")
    assert drawn(tmp_path / "empty.log")[1] < height


def test_only_nan(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"step": 1, "loss": NaN}\n{"step": 2, "loss": NaN}\n')
    drawn(tmp_path / "x.jsonl")


def test_without_matplotlib():
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from nanguard.view.report.png import picture\n"
        "from nanguard.view.runs import Run\n"
        "picture([Run('r', 'r')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "[plot]'" in done.stderr
