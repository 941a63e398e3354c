"""What is kept of runs while they are written, moved and deleted."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nanguard.view.runs import open_run
from nanguard.view.runs import run_follower as followed
from nanguard.view.server import overview as digests
from nanguard.view.server.index import Folder, Index
from nanguard.view.server.overview import Digest
from tests.nobody import as_nobody, open_folder
from tests.view.runs.runs import write_incident, write_record

if TYPE_CHECKING:
    from nanguard.view.runs import FoundRun
    from nanguard.view.server.overview import RunSummary


LOGS = Path(__file__).parents[2] / "logs"


def summary(digest: Digest, found: FoundRun) -> RunSummary:
    return list(digest.read(found))[-1]


def only(root: Path) -> FoundRun:
    (found,) = Folder(root).runs().values()
    return found


def append(path: Path, **fields: object) -> None:
    with path.open("a") as file:
        file.write(json.dumps(fields, separators=(",", ":")) + "\n")


def test_summary_grows_with_the_run(tmp_path):
    folder = write_record(tmp_path / "run", 100, bad=range(40, 43))
    digest, found = Digest(), only(tmp_path)
    told = summary(digest, found)
    assert (told.main.name, told.main.step, told.points) == ("loss", 99, 100)
    assert (told.main.spark.bad, told.errors, told.state) == (3, 3, "running")
    append(folder / "metrics.jsonl", step=100, loss="nan")
    told = summary(digest, found)
    assert (told.main.step, told.points, told.state) == (100, 101, "bad")
    assert math.isnan(told.main.spark.last)
    append(folder / "metrics.jsonl", step=101, loss=0.5)
    assert summary(digest, found).state == "running"
    append(folder / "events.jsonl", step=101, action="stop", severity="error", message="no")
    told = summary(digest, found)
    assert (told.state, told.errors) == ("bad", 4)


def test_summary_of_a_run_written_anew(tmp_path):
    folder = write_record(tmp_path / "run", 100)
    digest, found = Digest(), only(tmp_path)
    summary(digest, found)
    (folder / "metrics.jsonl").write_text('{"step":0,"update":0,"loss":9.5}\n')
    told = summary(digest, found)
    assert (told.points, told.main.spark.last) == (1, 9.5)
    (folder / "metrics.jsonl").unlink()
    told = summary(digest, found)
    assert "gone" in told.problem
    assert told.points == 1


def test_old_run_has_ended_and_one_that_writes_seldom_has_not(tmp_path):
    path = tmp_path / "metrics.jsonl"
    now = time.time()
    for step in range(10):
        append(path, step=step, update=step, loss=1.0, time=now - 6000 + 600 * step)
    digest, found = Digest(), only(tmp_path)
    os.utime(path, (now - 600, now - 600))
    assert summary(digest, found).state == "running"
    os.utime(path, (now - 90_000, now - 90_000))
    assert summary(digest, found).state == "ended"


def test_other_formats_are_read_again(tmp_path):
    log = tmp_path / "metrics.csv"
    log.write_text("step,loss\n0,4\n1,3\n")
    digest, found = Digest(), only(tmp_path)
    assert summary(digest, found).points == 2
    with log.open("a") as file:
        file.write("2,2\n")
    told = summary(digest, found)
    assert (told.points, told.main.spark.last, told.main.step) == (3, 2.0, 2)


def test_files_of_one_run_are_read_together(tmp_path, monkeypatch):
    (events,) = (LOGS / "open" / "tb_ok").iterdir()
    for n in range(3):
        shutil.copy(events, tmp_path / f"{events.name}.{n}")
    found = only(tmp_path)
    assert len(found.logs) == 3
    opened = []
    monkeypatch.setattr(digests, "open_run", lambda run: opened.append(run) or open_run(run))
    digest = Digest()
    assert summary(digest, found).points > 0
    assert len(opened) == 1
    summary(digest, found)
    assert len(opened) == 1


def test_log_of_others_that_writes_seldom_is_running(tmp_path):
    log = tmp_path / "train.log"
    digest = Digest()
    now = time.time()
    for number, when in enumerate((now - 700, now - 400, now - 100)):
        with log.open("a") as file:
            file.write(f"step {number} loss 2.0\n")
        os.utime(log, (when, when))
        told = summary(digest, only(tmp_path))
    assert told.pace == pytest.approx(300, abs=1)
    assert told.state == "running"


def test_page_of_an_earlier_server_gets_every_row(tmp_path):
    write_record(tmp_path / "run")
    first = Index(tmp_path)
    first._search()
    second = Index(tmp_path)
    second._search()
    (entry,) = second.entries.values()
    assert entry.version >= first.version


def test_folder_of_others_does_not_end_the_index():
    with open_folder() as folder:
        write_record(folder / "mine")
        (folder / "theirs").mkdir(mode=0o700)
        with as_nobody():
            index = Index(folder)
            index._search()
            assert [entry.found.name for entry in index.entries.values()] == ["mine"]
            assert "theirs" in index.folder.problems[0]


def test_folder_notices_what_comes_and_goes(tmp_path):
    folder = Folder(tmp_path)
    assert folder.runs() == {}
    run = write_record(tmp_path / "a" / "b" / "run")
    (key,) = first = folder.runs()
    assert folder.runs()[key] is first[key]
    write_incident(run / "incidents", 7)
    write_incident(run / "incidents", 8)
    assert len(folder.runs()[key].incidents) == 2
    # A log that says nothing yet, and then does.
    log = tmp_path / "later.log"
    log.write_text("hello\n")
    assert len(folder.runs()) == 1
    log.write_text("".join(f"step {n} loss: {n}\n" for n in range(5)))
    assert len(folder.runs()) == 2
    for file in (run / "metrics.jsonl", run / "events.jsonl", run / "training_history.csv"):
        file.unlink()
    assert [found.logs for found in folder.runs().values() if found.logs] == [[log]]


def test_links_that_lead_out_are_dropped_also_later(tmp_path):
    outside = write_record(tmp_path / "outside")
    root = tmp_path / "root"
    run = write_record(root / "run")
    folder = Folder(root)
    (found,) = folder.runs().values()
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").symlink_to(outside / "metrics.jsonl")
    assert folder.confined(found).logs == []
    inner = write_record(root / "inner")
    (root / "again.jsonl").symlink_to(inner / "metrics.jsonl")
    names = sorted(one.name for one in folder.runs().values())
    assert names == ["inner", "root", "run"]


def test_folder_that_is_gone_is_told(tmp_path):
    root = tmp_path / "root"
    write_record(root / "run")
    folder = Folder(root)
    assert len(folder.runs()) == 1
    root.rename(tmp_path / "other")
    assert folder.runs() == {}
    assert "cannot be read" in folder.problems[0]


def test_index_looks_at_what_changed(tmp_path, monkeypatch):
    run = write_record(tmp_path / "run")
    (run / "metrics.jsonl").open("a").close()
    index = Index(tmp_path)
    index._search()
    (entry,) = index.entries.values()
    index._refresh(entry)
    assert entry.summary.whole
    seen = index.version
    index._refresh(entry)
    assert (index.version, entry.wait) == (seen, 2.0)
    # Half a line, of which nothing follows.
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step":120,"update":120,"loss":0.25}')
    index._refresh(entry)
    assert entry.summary.points == 120
    monkeypatch.setattr(followed, "_SETTLED_SECONDS", 0.0)
    index._refresh(entry)
    assert entry.summary.points == 121
    assert entry.version > seen


def test_file_that_breaks_the_reader_does_not_stop_the_others(tmp_path, monkeypatch):
    write_record(tmp_path / "run")
    index = Index(tmp_path)
    index._search()
    (entry,) = index.entries.values()
    monkeypatch.setattr(entry.digest, "_read_log", lambda *_: 1 / 0)
    index._refresh(entry)
    assert entry.summary.problem == "it could not be read (ZeroDivisionError)"
    assert entry.summary.state == "running"


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"{" * 100_000, b'{"step":1,"loss":NaN}\n'])
def test_poor_files(tmp_path, content):
    (tmp_path / "metrics.jsonl").write_bytes(content)
    told = summary(Digest(), only(tmp_path))
    assert told.problem == ""
    assert told.points == (1 if b"step" in content else 0)
