"""Logs that end the process that reads them: report and serve show the others, and say so."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from nanguard.check import workers
from nanguard.view.runs import open_runs
from nanguard.view.runs.run_finder import find_runs
from nanguard.view.runs.run_follower import LiveRun

if TYPE_CHECKING:
    from pathlib import Path

needs_limits = pytest.mark.skipif(not workers.can_limit(), reason="needs Linux")
# A process of one thread, so that those that read are copies of it.
PROGRAM = """
import os, sys
from nanguard.check.log import log_reader

read = log_reader._READERS[log_reader.Form.CSV]

def abort_or_read(path, scan):
    if path.name == "bad.csv":
        os.abort()
    return read(path, scan)

log_reader._READERS[log_reader.Form.CSV] = abort_or_read
"""
REPORT = """
from nanguard.cli.entry import run
sys.exit(run(["report", "bad.csv", "good.csv", "-o", "report.html"]))
"""
# What a page of nanguard serve does, again and again.
LIVE = """
from nanguard.view.runs.run_finder import find_runs
from nanguard.view.runs.run_follower import LiveRun

lives = [LiveRun(found) for found in find_runs(["bad.csv", "good.csv"])]
for _ in range(2):
    for run in (live.read() for live in lives):
        print(run.name, len(run.curves), run.problems)
"""


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    for name in ("bad.csv", "good.csv"):
        rows = "".join(f"{step},{2.0 - step / 100}\n" for step in range(50))
        (tmp_path / name).write_text("step,loss\n" + rows)
    return tmp_path


def said(folder: Path, program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + program],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_limits
def test_a_report_shows_the_others(logs):
    assert "2 runs, 50 numbers" in said(logs, REPORT)
    assert "its reader crashed (SIGABRT)" in (logs / "report.html").read_text()


@needs_limits
def test_a_page_that_follows_runs_goes_on(logs):
    lines = said(logs, LIVE).splitlines()
    assert lines == 2 * [
        "bad.csv 0 ['bad.csv: its reader crashed (SIGABRT)']",
        "good.csv 1 []",
    ]


def test_where_processes_cannot_be_limited_files_are_read_here(logs, monkeypatch):
    monkeypatch.setattr(workers, "can_limit", lambda: False)
    monkeypatch.setattr(workers, "_start", None)
    names = ["bad.csv", "good.csv"]
    paths = [logs / name for name in names]
    assert [(run.name, len(run.main())) for run in open_runs(paths)] == [(n, 50) for n in names]
    assert [len(LiveRun(found).read().main()) for found in find_runs(paths)] == [50, 50]
