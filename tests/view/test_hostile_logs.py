"""Logs that are made to stall or end whoever follows them: ``watch`` and ``serve`` go on."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from nanguard.check import workers
from nanguard.check.log import text_log
from nanguard.check.log.series import MOST_NOTES, MOST_SERIES
from nanguard.view.runs import run_follower
from nanguard.view.runs.run_finder import find_runs
from nanguard.view.runs.run_follower import LiveRun
from nanguard.view.runs.run_reader import Terms
from nanguard.view.server import index as indexes
from nanguard.view.server import overview as digests
from nanguard.view.server.index import Index
from nanguard.view.server.overview import Digest
from nanguard.view.terminal import tail, watch_session
from nanguard.view.terminal.watch_session import Session, Wanted
from tests.cost import cpu_seconds

if TYPE_CHECKING:
    from pathlib import Path

SIZE = 300_000
GOOD = b"".join(b"step %d loss %.3f lr 0.001\n" % (n, 2.0 - n / 1e4) for n in range(40))
BAD_END = b"step 40 loss nan lr 0.001\n" * 3
HOSTILE = {
    "one-line": b"a",
    "numbers": b"loss: 1.0 ",
    "digits": b"loss: " + b"9" * 60_000 + b"\n",
    "zeros": b"epoch" + b"0" * 4000 + b"\n",
    "nul": b"\0",
    "returns": b"\r",
    "bar": b"1/9 loss: 1.0\r",
    "escapes": b"\x1b]",
    "colours": b"\x1b[" + b"0" * 60_000,
    "nested": b'{"loss":' * 6000 + b"\n",
    "spaces": b"loss" + b" " * 30_000 + b"|\n",
    "signs": b"=" * 30_000 + b"loss" + b":" * 30_000 + b"\n",
    "of": b"step" + b" " * 3000 + b"1/" * 1000 + b"\n",
    "not-utf8": b"\xed\xa0\x80 loss: 1.0\n",
    "names": b"".join(b"loss_%x: 1.0 " % n + b"\n" * (n % 100 == 0) for n in range(20_000)),
    "notes": b"".join(b"step %d: NaN loss detected in %x\n" % (n, n) for n in range(8000)),
    "ranks": b"".join(b"[rank %d] loss: 1.0\n" % n for n in range(15_000)),
}
needs_limits = pytest.mark.skipif(not workers.can_limit(), reason="needs Linux")


def text(name: str) -> bytes:
    """Returns a good beginning, hostile text of a known size, and an end that is bad."""
    part = HOSTILE[name]
    return GOOD + (part * (SIZE // len(part) + 1))[:SIZE] + b"\n" + BAD_END


def follow(path: Path) -> Session:
    """Reads a log as ``nanguard watch`` follows it."""
    session = Session(Wanted((str(path),)))
    session.look()
    while session.reading:
        session.look()
    return session


@pytest.mark.parametrize("name", HOSTILE)
def test_what_follows_hostile_text_is_judged_in_time(tmp_path: Path, name: str):
    path, usual = tmp_path / "train.log", tmp_path / "usual.log"
    path.write_bytes(text(name))
    usual.write_bytes(b"".join(b"step %d loss 2.5 lr 0.001\n" % n for n in range(SIZE // 24)))
    sessions: list[Session] = []
    cost = cpu_seconds(lambda: sessions.append(follow(path)))
    # Some take 20 times as long as a usual log; what searches a line again and again, thousands.
    assert cost < 300 * cpu_seconds(lambda: follow(usual))
    (state,) = [run.state for run in sessions[0].runs]
    assert "not finite" in state.bad_loss()
    (log,) = state.logs.values()
    assert len(log.series) <= MOST_SERIES
    assert len(log.notes) <= MOST_NOTES
    assert all(len(one.tail._left) <= tail.LONGEST for one in sessions[0].runs[0].files)
    sessions[0].close()

    (found,) = find_runs([path])
    assert list(Digest().read(found))[-1].findings > 0
    losses = [curve for curve in LiveRun(found).read().curves if curve.name == "loss"]
    assert losses


def test_terms_are_searched_for_once_in_a_line():
    first = b'{"step":1,"loss":1.0,"terms":{"a":0.5}}\n'
    usual, hostile = Terms(), Terms()
    text = first + b'"step":1,' * 20_000 + b"\n" + first
    cost = cpu_seconds(lambda: hostile.feed(text))
    assert cost < 300 * cpu_seconds(lambda: usual.feed(first * 5000))
    assert [len(terms.series["a"]) for terms in (usual, hostile)] == [5000, 2]


def test_a_view_is_drawn_between_two_pieces_of_a_slow_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(watch_session, "_BUDGET_SECONDS", -1.0)
    monkeypatch.setattr(tail, "CHUNK", 100)
    path = tmp_path / "train.log"
    path.write_bytes(GOOD)
    session = Session(Wanted((str(path),)))
    looks = 0
    session.look()
    while session.reading:
        looks += 1
        session.look()
    assert looks >= len(GOOD) // 100 - 1
    assert session.runs[0].state.step == 39
    session.close()


def test_every_run_has_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(digests, "_AT_ONCE", 200)
    monkeypatch.setattr(indexes, "_TURN", -1.0)
    monkeypatch.setattr(indexes, "SOON", 0.0)
    for name, content in (("long", GOOD), ("short", GOOD[:100])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.log").write_bytes(content)
    index = Index(tmp_path)
    index._search()
    states = []
    while not all(entry.summary.whole for entry in index.entries.values()):
        for entry in index._due():
            index._refresh(entry)
        states.append({entry.found.name: entry.summary.whole for entry in index.entries.values()})
    assert states[0] == {"long": False, "short": True}
    assert states[-1] == {"long": True, "short": True}
    long = next(e for e in index.entries.values() if e.found.name == "long")
    assert long.summary.points == 40


def test_a_page_shows_what_was_read_in_time_and_later_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(run_follower, "_PIECE_BYTES", 100)
    monkeypatch.setattr(run_follower, "_PAGE_SECONDS", -1.0)
    (tmp_path / "train.log").write_bytes(GOOD)
    (found,) = find_runs([tmp_path / "train.log"])
    live, seen = LiveRun(found), []
    run = live.read()
    while live.read_so_far is not None:
        assert run.problems == ["train.log: the first 0 MiB are shown"]
        seen.append((live.read_so_far, len(run.main() or ())))
        run = live.read()
    assert len(seen) >= 3
    assert seen == sorted(set(seen))
    assert (run.problems, len(run.main() or ())) == ([], 40)


def test_a_panic_of_the_engine_for_large_logs_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    polars = pytest.importorskip("polars")
    monkeypatch.setattr(text_log, "_BULK", 1)

    def panic(*_given: object) -> None:
        raise polars.exceptions.PanicException("a bug in polars")

    monkeypatch.setattr(text_log.Bulk, "_take", panic)
    (tmp_path / "train.log").write_bytes(GOOD * 40)
    from nanguard.check.scan import Scan

    assert len(text_log.read_text(tmp_path / "train.log", Scan()).series[0]) == 1600


WATCH = """
import os, sys
from nanguard.check.log import log_reader

read = log_reader._READERS[log_reader.Form.CSV]

def abort_or_read(path, scan):
    if path.name == "bad.csv":
        os.abort()
    return read(path, scan)

log_reader._READERS[log_reader.Form.CSV] = abort_or_read
from nanguard.cli.entry import run
sys.exit(run(["watch", "--once", "bad.csv", "good.csv"]))
"""


@needs_limits
def test_a_log_that_ends_its_reader_does_not_end_the_watch(tmp_path: Path):
    for name in ("bad.csv", "good.csv"):
        rows = "".join(f"{step},{2.0 - step / 100}\n" for step in range(50))
        (tmp_path / name).write_text("step,loss\n" + rows)
    done = subprocess.run(
        [sys.executable, "-c", WATCH],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "its reader crashed (SIGABRT)" in done.stdout, done.stderr
    assert "good.csv  step 49" in done.stdout
