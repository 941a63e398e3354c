"""The verdict in words: when it turned, what moved first, what was done, how it ended."""

from __future__ import annotations

import math
from array import array

import pytest

from nanguard.view.report.verdict import (
    BAD,
    GOOD,
    GUARDED,
    NOTHING,
    judge,
    moves_before,
    verdict_of,
)
from nanguard.view.runs import Curve, EventKind, Panel, Run, RunEvent, open_runs
from tests.view.runs.runs import write_incident, write_record


def judged(*paths):
    (run,) = open_runs(paths)
    judge(run)
    return run


def written(path, losses, norms=()):
    lines = []
    for step, loss in enumerate(losses):
        norm = f" grad_norm {norms[step]}" if norms else ""
        lines.append(f"step {step} loss {loss}{norm}\n")
    path.write_text("".join(lines))
    return path


def healthy(count):
    return [round(2.0 - n / 1000 + 0.01 * (n * 7 % 11), 4) for n in range(count)]


def fact(verdict, title):
    return dict(verdict.facts).get(title, "")


def test_healthy(tmp_path):
    verdict = verdict_of(judged(written(tmp_path / "train.log", healthy(60))))
    assert verdict.state == GOOD
    assert verdict.turn is None
    assert fact(verdict, "How it ended").startswith(
        "The last loss, at step 59, is 2.001; the first was 2"
    )


def test_went_bad_and_what_moved_first(tmp_path):
    losses = [*healthy(100), *["nan"] * 20]
    norms = [*[1.0 + 0.01 * (n % 5) for n in range(90)], *[2.0 * 2**n for n in range(10)]]
    path = written(tmp_path / "train.log", losses, [*norms, *["nan"] * 20])
    run = judged(path)
    verdict = verdict_of(run)
    assert verdict.state == BAD
    assert verdict.headline == "The run went bad at step 100 and did not come back."
    assert "loss is nan at step 100" in fact(verdict, "When it turned")
    assert fact(verdict, "What moved first").startswith(
        "Before it turned, this left its usual range: grad_norm from step 90 on (1.02 to 1024)"
    )
    assert "20 of 120 values are not finite" in fact(verdict, "How it ended")
    stretch = next(event for event in run.events if event.kind is EventKind.NON_FINITE)
    assert (stretch.step, stretch.last, stretch.count) == (100, 119, 20)


def test_numbers_that_came_back(tmp_path):
    losses = [*healthy(50), "inf", *healthy(20)]
    verdict = verdict_of(judged(written(tmp_path / "train.log", losses)))
    assert verdict.headline == "The run went bad at step 50, and its numbers came back later."


def test_every_spike_is_marked(tmp_path):
    losses = healthy(400)
    losses[200] = losses[300] = 90.0
    run = judged(written(tmp_path / "train.log", losses))
    assert [e.step for e in run.events if e.kind is EventKind.SPIKE] == [200, 300]
    verdict = verdict_of(run)
    assert verdict.state == GUARDED
    assert verdict.headline == "The run stayed finite; there is one thing to look at."


def test_guarded_run_and_its_cause(tmp_path):
    write_record(tmp_path)
    write_incident(tmp_path / "incidents", 40)
    run = judged(tmp_path)
    # What the guard wrote down is not told a second time.
    assert [e.step for e in run.events if e.kind is EventKind.NON_FINITE] == []
    verdict = verdict_of(run)
    assert verdict.state == GUARDED
    assert verdict.headline == (
        "A loss or gradient went bad at step 40; the guard kept it out of the weights, and the run "
        "went on."
    )
    why = fact(verdict, "Where and why")
    assert why == (
        "train.py:5: log(0): 3 of 512   [log-or-sqrt-domain, proven]. A fix was tried and held: "
        "clamp it."
    )


def test_what_a_replay_did_not_show_is_not_claimed(tmp_path):
    replay = {"verdict": "not-replayed", "method": None}
    write_incident(tmp_path, 7, replay=replay, fixes=[], trials=[], path=[])
    why = fact(verdict_of(judged(tmp_path)), "Where and why")
    assert "[log-or-sqrt-domain, likely]" in why
    assert "proven" not in why
    assert "held" not in why


def test_the_guard_stopped_it():
    run = Run(
        "r", "r", events=[RunEvent(EventKind.STOP, 9, "all rollbacks are spent", reason="spent")]
    )
    run.events.insert(0, RunEvent(EventKind.ROLLBACK, 5, "rolled back", count=2))
    verdict = verdict_of(run)
    assert verdict.state == BAD
    assert verdict.headline == "The run went bad at step 5, and the guard stopped it."
    assert fact(verdict, "What the guard did").startswith("It rolled back 2 times and stopped")


@pytest.mark.parametrize("logs", [True, False])
def test_not_looked_at_is_never_healthy(tmp_path, logs):
    if logs:
        (tmp_path / "train.log").write_text("")
        run = judged(tmp_path / "train.log")
    else:
        run = Run("r", "r", curves=[Curve("loss", Panel.LOSS, range(3), array("f", [1, 2, 3]))])
    assert verdict_of(run).state == NOTHING


def curve(values, name="grad_norm", panel=Panel.GRAD_NORM):
    return Curve(name, panel, range(len(values)), array("d", values))


def test_noise_is_no_move():
    noisy = [1.0 + 0.3 * math.sin(n * 1.7) for n in range(200)]
    assert moves_before(Run("r", "r", curves=[curve(noisy)]), 200) == []


def test_a_spike_that_came_back_is_no_move():
    values = [1.0] * 200
    values[150] = 50.0
    assert moves_before(Run("r", "r", curves=[curve(values)]), 200) == []


def test_moves_come_in_order_and_scales_fall():
    loss = [*[1.0] * 180, *[9.0] * 20]
    scale = [*[65536.0] * 150, *[1024.0] * 50]
    run = Run(
        "r", "r", curves=[curve(loss, "loss", Panel.LOSS), curve(scale, "scale", Panel.SCALE)]
    )
    assert [(m.name, m.step, m.usual, m.then) for m in moves_before(run, 200)] == [
        ("scale", 150, 65536.0, 1024.0),
        ("loss", 180, 1.0, 9.0),
    ]
