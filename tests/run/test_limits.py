"""How long explanations may take: given loads and times, and no clock."""

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from nanguard.diagnose import lab, session
from nanguard.diagnose.lab import Budget, Lab, TimeLimits, limits_for, load_factor
from nanguard.errors import IncidentError
from nanguard.incident import Incident
from nanguard.replay.task import Task
from nanguard.run import again
from nanguard.run.waiting import SignOfLife


class Hands:
    """A clock that is turned by hand."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize(
    ("load", "cores", "factor"),
    [
        (0.0, 8, 1.0),
        (8.0, 8, 1.0),
        (24.0, 8, 3.0),
        (3.0, 2, 1.5),
        (500.0, 2, lab.MOST_LOAD),
        (4.0, 0, 4.0),
        (math.nan, 2, 1.0),
    ],
)
def test_load_factor(load, cores, factor):
    assert load_factor(load, cores) == factor


def test_load_of_this_machine_is_within_bounds(monkeypatch):
    assert 1 <= lab.load_now() <= lab.MOST_LOAD
    monkeypatch.setattr(os, "getloadavg", lambda: (10.0 * lab._cores(), 0.0, 0.0))
    assert lab.load_now() >= 10


@pytest.mark.parametrize(
    ("to_step", "total", "expected"),
    [
        (0.0, None, TimeLimits(30.0, 180.0)),
        (7.0, None, TimeLimits(30.0, 180.0)),
        (100.0, None, TimeLimits(400.0, 2400.0)),
        (0.0, 60.0, TimeLimits(30.0, 60.0, fixed=True)),
        (0.0, 12.0, TimeLimits(12.0, 12.0, fixed=True)),
        (0.0, 3600.0, TimeLimits(1200.0, 3600.0, fixed=True)),
        (100.0, 60.0, TimeLimits(60.0, 60.0, fixed=True)),
    ],
)
def test_limits_follow_the_run_or_the_user(to_step, total, expected):
    assert limits_for(to_step, total) == expected


def test_whether_an_explanation_can_be_made_in_its_time():
    assert limits_for(1e6).allows(1e6)
    assert limits_for(20, 60).allows(20)
    assert not limits_for(21, 60).allows(21)


@pytest.mark.parametrize(
    ("run", "method", "seconds"),
    [
        ({"seconds": 400.0, "ordinal": 99}, "second-run", 400.0),
        ({"seconds": 400.0, "ordinal": 99}, "in-place", 60.0),
        ({"seconds": 40.0, "ordinal": 99}, "in-place", 40.0),
        ({"seconds": 36000.0, "ordinal": 99}, "in-place", 1080.0),
        ({"seconds": 400.0, "ordinal": 0}, "in-place", 400.0),
        ({"seconds": "soon", "ordinal": None}, "second-run", 0.0),
        ({"seconds": math.inf}, "second-run", 0.0),
        (None, "second-run", 0.0),
    ],
)
def test_seconds_up_to_the_step(run, method, seconds):
    assert lab.seconds_to_step(Incident({"run": run}), method) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "total"), [("45", 45.0), ("", None), ("-1", None), ("nan", None), ("soon", None)]
)
def test_what_the_user_has_chosen(monkeypatch, text, total):
    monkeypatch.setenv(lab.VARIABLE, text)
    assert lab.chosen_total() == total


def test_a_busy_machine_stretches_the_budget():
    clock, load = Hands(), 3.0
    budget = Budget(TimeLimits(30.0, 50.0), load=lambda: load, clock=clock)
    with budget.replay() as seconds:
        assert seconds == 90.0
        clock.now += 90
    assert not budget.is_used_up
    with budget.replay() as seconds:
        assert seconds == 60.0
        load = 6.0  # it has become busier meanwhile
        clock.now += 60
    with budget.replay() as seconds:
        assert seconds == 60.0
        clock.now += 60
    assert budget.is_used_up


def test_seconds_of_the_user_are_not_stretched():
    clock = Hands()
    budget = Budget(limits_for(0, 40.0), load=lambda: 8.0, clock=clock)
    with budget.replay() as seconds:
        assert seconds == 30.0
        clock.now += 35
    with budget.replay() as seconds:
        assert seconds == 5.0


def test_a_lab_tries_nothing_when_its_time_is_used_up():
    clock, given = Hands(), []

    class Slow:
        def run(self, _task, seconds):
            given.append(seconds)
            clock.now += seconds

    lab = Lab(Slow(), Task(3), Budget(TimeLimits(30.0, 40.0), load=lambda: 1.0, clock=clock))
    assert lab.trace() is None
    assert lab.try_out("something").result == "no answer within the time"
    assert lab.out_of_time
    lab.try_out("something else")
    assert given == [30.0, 10.0]


def test_an_explanation_tells_until_when_its_replay_may_go_on(tmp_path, monkeypatch):
    monkeypatch.delenv(lab.VARIABLE, raising=False)
    message = {
        "folder": "/runs/step-000007-rank0",
        "incident": {"run": {"seconds": 100.0, "ordinal": 7}},
        "method": "second-run",
        "control": str(tmp_path),
    }
    note = tmp_path / "trying-step-000007-rank0"
    assert lab.read_note(note) is None
    before = time.monotonic()
    with session._budget(message).replay() as allowed:
        assert allowed >= 400
    assert lab.read_note(note) >= before + allowed
    note.write_text("half")
    assert lab.read_note(note) is None


@pytest.mark.parametrize(
    ("until", "load", "end"),
    [(None, 1.0, 280.0), (None, 2.0, 460.0), (500.0, 1.0, 530.0), (500.0, 2.0, 560.0)],
)
def test_deadline(until, load, end):
    assert lab.deadline(100.0, 180.0, until, load) == end


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_sign_of_life_on_a_terminal():
    stream, clock = Terminal(), Hands()
    sign = SignOfLife(stream=stream, clock=clock)
    for _ in range(3):
        sign.show("explaining step-7")
    clock.now += 12.5
    sign.show("explaining step-7")
    sign.end()
    lines = stream.getvalue().split("\r\x1b[K")
    assert lines == [
        "",
        "nanguard: explaining step-7 ... 0 s",
        "nanguard: explaining step-7 ... 12 s",
        "",
    ]


def test_sign_of_life_in_a_pipe_comes_back_ever_later():
    stream, clock = io.StringIO(), Hands()
    sign = SignOfLife(stream=stream, clock=clock)
    for _ in range(400):
        sign.show("explaining step-7")
        clock.now += 1
    seconds = [line.split(" ... ")[1] for line in stream.getvalue().splitlines()[1:]]
    assert seconds == ["10 s", "20 s", "40 s", "80 s", "160 s", "280 s"]


def test_sign_of_life_in_a_file_is_two_lines():
    stream, clock = io.StringIO(), Hands()
    sign = SignOfLife(stream=stream, clock=clock)
    sign.end()
    for _ in range(3):
        sign.show("explaining step-7")
        clock.now += 2
    sign.end("the explanations ended")
    assert stream.getvalue() == (
        "nanguard: explaining step-7 ...\nnanguard: the explanations ended after 6 s\n"
    )
    quiet = io.StringIO()
    SignOfLife(stream=quiet, quiet=True).show("explaining step-7")
    assert quiet.getvalue() == ""


def test_sign_of_life_says_how_far_it_is():
    stream, clock = Terminal(), Hands()
    sign = SignOfLife(stream=stream, clock=clock)
    sign.show("explaining step-7", "replay 1, step 3 of 7")
    sign.end()
    line = "nanguard: explaining step-7 ... replay 1, step 3 of 7, 0 s"
    assert stream.getvalue().split("\r\x1b[K") == ["", line, ""]
    stream = io.StringIO()
    sign = SignOfLife(stream=stream, clock=clock)
    for step in range(12):
        sign.show("explaining step-7", f"step {step} of 30")
        clock.now += 1
    assert stream.getvalue() == (
        "nanguard: explaining step-7 ...\nnanguard: explaining step-7 ... step 10 of 30, 10 s\n"
    )


@pytest.mark.parametrize("kind", [Terminal, io.StringIO])
def test_sign_of_life_may_be_silent_for_a_while(kind):
    stream, clock = kind(), Hands()
    sign = SignOfLife(stream=stream, clock=clock, after=10)
    sign.show("explaining step-7")
    clock.now += 9
    sign.show("explaining step-7")
    sign.end()
    assert stream.getvalue() == ""
    sign.show("explaining step-7")
    clock.now += 12
    sign.show("explaining step-7", "replay 4")
    assert "nanguard: explaining step-7 ... replay 4, 12 s" in stream.getvalue()


def test_sign_of_life_needs_no_stream():
    closed = io.StringIO()
    closed.close()
    sign = SignOfLife(stream=closed)
    sign.show("explaining step-7")
    sign.end()


def incident(folder, command, **run):
    folder.mkdir(exist_ok=True)
    told = {"command": command, "folder": str(folder), "ordinal": 5, "ranks": 1, **run}
    found = {"schema": "nanguard.incident/1", "step": 5, "rank": 0, "run": told}
    found["replay"] = {"verdict": "not-replayed", "method": None}
    (folder / "incident.json").write_text(json.dumps(found))
    return Incident(found)


def test_a_second_run_that_cannot_finish_is_not_started(tmp_path):
    folder = tmp_path / "step-000005-rank0"
    found = incident(folder, [sys.executable, "-c", "open('began', 'w')"], seconds=50.0)
    assert again.fits(found, None)
    assert again.fits(found, 150.0)
    assert not again.fits(found, 149.0)
    with pytest.raises(IncidentError, match=r"20 s are not enough: the run took 50 s") as raised:
        again.explain(folder, seconds=20.0)
    assert "--explain-seconds 1200" in raised.value.do
    assert not (folder / "began").exists()
    late = incident(folder, ["python"], seconds=61.0)
    assert not again.fits(late, None)
    assert again.fits(late, 600.0)


def test_a_second_run_that_hangs_is_ended(tmp_path, monkeypatch):
    folder = tmp_path / "step-000005-rank0"
    incident(folder, [sys.executable, "-c", "import time; time.sleep(1000)"], seconds=1.0)
    monkeypatch.setattr(again.lab, "deadline", lambda *_: 0.0)
    with pytest.raises(IncidentError, match="did not come to the step") as raised:
        again.replay(folder)
    assert "it took too long" in raised.value.do


def test_limits_reach_the_processes_below(monkeypatch):
    from nanguard.run.command import environment
    from nanguard.run.control import Options

    monkeypatch.delenv(lab.VARIABLE, raising=False)
    base = {"incidents": "i", "control": "c", "command": ("python",), "folder": "."}
    assert lab.VARIABLE not in environment(Options(**base))
    chosen = environment(Options(**base, explain_seconds=42.5))
    assert chosen[lab.VARIABLE] == "42.5"


@pytest.mark.parametrize(("arguments", "seconds"), [([], None), (["--explain-seconds", "9"], 9.0)])
def test_the_option_of_run(monkeypatch, tmp_path, arguments, seconds):
    from nanguard.cli.entry import run
    from nanguard.run import command

    given = SimpleNamespace()
    monkeypatch.setattr(command, "run_command", lambda *_, **kw: given.__dict__.update(kw) or 0)
    assert run(["run", *arguments, "--", sys.executable, "x.py"]) == 0
    assert given.explain_seconds == seconds


SLOW = """
import time
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(8):
    time.sleep(0.3)
    loss = model(torch.randn(4, 4)).mean() / (step != 6)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_who_waits_for_a_replay_hears_how_far_it_is(tmp_path):
    (tmp_path / "train.py").write_text(SLOW)
    guarded = ["-m", "nanguard", "run", "--no-trace", "--run-dir", "found", "--"]
    subprocess.run(
        [sys.executable, *guarded, sys.executable, "train.py"],
        cwd=tmp_path,
        capture_output=True,
        timeout=180,
        check=True,
    )
    heard = []
    answer = again.replay(tmp_path / "found" / "step-000006-rank0", beat=heard.append)
    assert (answer["finite"], answer["step"]) == (False, 6)
    # Before the first replay there is nothing to tell; after that, steps come in order.
    told = list(dict.fromkeys(heard))
    assert told[0] == ""
    steps = [int(re.fullmatch(r"replay 1, step (\d) of 6", line)[1]) for line in told[1:]]
    assert steps == sorted(steps)
    assert steps[-1] > 2
