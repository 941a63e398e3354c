"""``nanguard report`` on the command line."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.view.runs.runs import write_record

if TYPE_CHECKING:
    from pathlib import Path


def call(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nanguard", "report", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)


def test_page_and_picture(tmp_path):
    write_record(tmp_path / "night")
    done = call("night", "-o", "out.html", "--png", "out.png", "--title", "One night", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        "out.html: 1 run, 722 numbers, 0 incidents, 0 findings\n"
        "out.png: 1 run, 722 numbers, 0 incidents, 0 findings\n"
    )
    assert "<title>One night</title>" in (tmp_path / "out.html").read_text()
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_default_name_and_quiet(tmp_path):
    write_record(tmp_path / "night")
    done = call("night", "--quiet", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "report.html").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gone"], "there is no such file or folder."),
        (["night", "gone"], "there is no such file or folder."),
        (["night", "-o", "gone/out.html"], "the report cannot be written: No such file"),
        (["night", "-o", "night/metrics.jsonl"], "this is one of the files that are reported on."),
    ],
)
def test_mistakes_are_said(tmp_path, words, message):
    write_record(tmp_path / "night")
    before = (tmp_path / "night" / "metrics.jsonl").read_bytes()
    done = call(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"nanguard: {message}")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "report.html").exists()
    assert (tmp_path / "night" / "metrics.jsonl").read_bytes() == before


def test_too_many_runs_for_a_page(tmp_path):
    for n in range(25):
        write_record(tmp_path / "runs" / f"{n:02}", steps=2, bad=range(0))
    done = call("runs", cwd=tmp_path)
    assert done.returncode == 2
    assert "there are 25 runs here, too many for one page." in done.stderr


def test_needs_no_torch(tmp_path):
    write_record(tmp_path / "night")
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "sys.argv = ['nanguard', 'report', 'night']\n"
        "from nanguard.cli import main\nmain()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
