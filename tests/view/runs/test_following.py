"""Runs that are still being written."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import pytest

from nanguard.check.log import text_log
from nanguard.view.report.verdict import judge
from nanguard.view.runs import find_below, open_run
from nanguard.view.runs import run_follower as followed
from nanguard.view.runs.run_follower import Follower, LiveRun, RunChange
from tests.view.runs.runs import write_record

if TYPE_CHECKING:
    from pathlib import Path


def line(step: int, loss: float = 1.0) -> str:
    return json.dumps({"step": step, "loss": loss}) + "\n"


def losses(follower: Follower) -> list[float]:
    return [value for series in follower.log.series for value in series.values]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    path.write_text(line(0, 4.0) + line(1, 3.0))
    return path


def test_only_what_was_appended_is_read(log, monkeypatch):
    follower = Follower(log)
    assert follower.read() is RunChange.GREW
    assert follower.read() is RunChange.SAME
    with log.open("a") as file:
        file.write(line(2, 2.0))
    monkeypatch.setattr(followed, "_READ_BYTES", 8)
    assert follower.read() is RunChange.GREW
    assert losses(follower) == [4.0, 3.0, 2.0]
    series = follower.log.series[0]
    assert list(series.steps) == [0, 1, 2]
    assert list(series.lines) == [1, 2, 3]


def test_half_a_line_is_waited_for(log, monkeypatch):
    follower = Follower(log)
    with log.open("a") as file:
        file.write('{"step": 2, "lo')
    follower.read()
    assert losses(follower) == [4.0, 3.0]
    with log.open("a") as file:
        file.write('ss": 1.5}\n')
    follower.read()
    assert losses(follower) == [4.0, 3.0, 1.5]


def test_last_line_without_an_end_is_taken_after_a_while(log, monkeypatch):
    follower = Follower(log)
    with log.open("a") as file:
        file.write(line(2, 1.5).rstrip())
    follower.read()
    assert follower.read() is RunChange.SAME
    monkeypatch.setattr(followed, "_SETTLED_SECONDS", 0.0)
    assert follower.read() is RunChange.GREW
    assert losses(follower) == [4.0, 3.0, 1.5]
    with log.open("a") as file:
        file.write("\n" + line(3, 1.0))
    follower.read()
    assert losses(follower) == [4.0, 3.0, 1.5, 1.0]


def test_truncated_replaced_and_rewritten_files_are_read_anew(log):
    follower = Follower(log)
    follower.read()
    log.write_text(line(0, 9.0))
    assert follower.read() is RunChange.ANEW
    assert losses(follower) == [9.0]
    log.rename(log.with_suffix(".1"))
    log.write_text(line(0, 8.0) + line(1, 7.0))
    assert follower.read() is RunChange.ANEW
    assert losses(follower) == [8.0, 7.0]
    # The same file, longer than before, with another beginning.
    log.write_text(line(0, 6.0) + line(1, 5.0) + line(2, 4.0))
    assert follower.read() is RunChange.ANEW
    assert losses(follower) == [6.0, 5.0, 4.0]


def test_deleted_file_keeps_what_was_read(log):
    follower = Follower(log)
    follower.read()
    log.unlink()
    assert follower.read() is RunChange.GONE
    assert losses(follower) == [4.0, 3.0]
    log.write_text(line(0, 2.0))
    follower.read()
    assert losses(follower) == [2.0]


def test_line_without_end_is_passed_over(log, monkeypatch):
    monkeypatch.setattr(text_log, "_BLOCK_BYTES", 1000)
    monkeypatch.setattr(followed, "_READ_BYTES", 300)
    follower = Follower(log)
    with log.open("a") as file:
        file.write("q" * 5000 + "\n" + line(3, 2.5))
    follower.read()
    assert losses(follower) == [4.0, 3.0, 2.5]
    assert list(follower.log.series[0].lines) == [1, 2, 4]


def test_progress_bar_is_followed_before_its_line_ends(tmp_path):
    path = tmp_path / "train.log"
    shown = [f"step {n} loss {n}.5 {'.' * 100}" for n in range(14_000)]
    path.write_text("\r".join(shown[:7000]) + "\r")
    follower = Follower(path)
    follower.read()
    # The last one may still be at half of a line's end.
    assert losses(follower) == [n + 0.5 for n in range(6999)]
    with path.open("a") as file:
        file.write("\r".join(shown[7000:]) + "\nstep 14000 loss 1.5\n")
    follower.read()
    assert losses(follower) == [*(n + 0.5 for n in range(14_000)), 1.5]
    (read,) = open_run(next(find_below(tmp_path))).logs
    assert list(follower.log.series[0].lines) == list(read.series[0].lines)


def test_reading_in_parts_and_letting_go(log):
    log.write_text("".join(line(n, n) for n in range(1000)))
    follower = Follower(log)
    got: list[float] = []
    follower.behind = True
    while follower.behind:
        follower.read(limit=5000)
        got += [value for series in follower.drain().series for value in series.values]
    assert got == list(range(1000))
    assert losses(follower) == []


def test_live_run_is_the_run_that_is_read_at_once(tmp_path):
    folder = write_record(tmp_path / "run")
    event = {"code": "RUN001", "name": "non-finite-loss", "step": 40, "message": "the loss is nan"}
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n")
    (found,) = find_below(folder)
    live = LiveRun(found)
    live.read()
    with (folder / "metrics.jsonl").open("a") as file:
        record = {"step": 120, "update": 120, "loss": "nan", "terms": {"text": 1.0, "latent": 2.0}}
        file.write(json.dumps(record, separators=(",", ":")) + "\n")
    grown, fresh = live.read(), open_run(found)
    told = [
        [(c.name, list(c.xs), list(map(repr, c.values))) for c in r.curves] for r in (grown, fresh)
    ]
    assert told[0] == told[1]
    assert grown.events == fresh.events
    assert grown.problems == fresh.problems
    assert grown.clock == fresh.clock
    assert [log.notes for log in grown.logs] == [log.notes for log in fresh.logs]
    for run in (grown, fresh):
        judge(run)
    assert grown.findings == fresh.findings != []
    assert math.isnan(grown.main().values[-1])


def test_live_run_whose_log_is_gone_says_so(tmp_path):
    folder = write_record(tmp_path / "run")
    (found,) = find_below(folder)
    live = LiveRun(found)
    before = live.read().points
    (folder / "metrics.jsonl").unlink()
    run = live.read()
    assert run.points == before
    assert "metrics.jsonl: the file is gone; what was read before is shown" in run.problems


def test_csv_is_read_again(tmp_path):
    log = tmp_path / "metrics.csv"
    log.write_text("step,loss\n0,4\n1,3\n")
    (found,) = find_below(tmp_path)
    live = LiveRun(found)
    live.read()
    with log.open("a") as file:
        file.write("2,2\n")
    assert list(live.read().main().values) == [4, 3, 2]
