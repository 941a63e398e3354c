"""The parts of a recovery by themselves: templates, configurations, endings, decisions."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nanguard.errors import UsageError
from nanguard.run.children import adopt_orphans, descendants, end_descendants, wait_for
from nanguard.run.control import Heartbeat, Steps, read_steps
from nanguard.run.recovering import lineage
from nanguard.run.recovering.audit import Audited, Auditor, CheckpointVerdict, Judged, Places
from nanguard.run.recovering.ladder import (
    End,
    Ending,
    Ladder,
    Means,
    Restart,
    RunEnding,
    read_ending,
)
from nanguard.run.recovering.lineage import Positions
from nanguard.run.recovering.restart_options import (
    Changes,
    ConfigFile,
    Key,
    RestartOptions,
    Teller,
    rate_key,
)
from nanguard.run.recovering.templates import Template

VALUES = Changes(2, "a b.pt", 10, 1e-4, 3, 8).values()


# Templates.


@pytest.mark.parametrize(
    ("template", "command", "expected", "value"),
    [
        ("--lr {lr}", "t.py --lr 1e-3 --x 3", "t.py --lr 1.0e-4 --x 3", "1e-3"),
        ("--lr {lr}", "t.py --lr=1e-3 --x 3", "t.py --lr 1.0e-4 --x 3", "1e-3"),
        ("--lr={lr}", "t.py --lr 1e-3", "t.py --lr=1.0e-4", "1e-3"),
        ("--lr={lr}", "t.py", "t.py --lr=1.0e-4", None),
        ("--lr {lr}", "t.py --lr 1 --lr 2", "t.py --lr 1 --lr 1.0e-4", "2"),
        ("optim.lr={lr}", "t.py optim.lr=3 a=b", "t.py optim.lr=1.0e-4 a=b", "3"),
        ("optim.lr={lr}", "t.py +optim.lr=3", "t.py optim.lr=1.0e-4", "3"),
        ("--set t.lr={lr}", "t.py --set a=1 --set t.lr=3 -o d", None, "3"),
        ("--set t.lr={lr}", "t.py --set a=1 t.lr=3 -o d", None, "3"),
        ("--set t.lr={lr}", "t.py --set a=1", "t.py --set a=1 --set t.lr=1.0e-4", None),
        ("--lr {lr} --new", "t.py --lr -3", "t.py --lr 1.0e-4 --new", "-3"),
        ("{lr}", "t.py --flag", "t.py --flag 1.0e-4", None),
        ("--lr {lr}", "t.py --lr", "t.py --lr 1.0e-4", None),
        ("--lr {lr}", "t.py --lr --x", "t.py --lr 1.0e-4 --x", None),
        ("a={{b}}{lr}", "t.py", "t.py 'a={b}1.0e-4'", None),
    ],
)
def test_arguments_replace_what_is_there_or_come_last(template, command, expected, value):
    read = Template.of(template, "--lr-arg", ["lr"])
    words = shlex.split(command)
    expected = expected or command.replace("t.lr=3", "t.lr=1.0e-4")
    assert read.into(words, VALUES) == shlex.split(expected)
    assert read.value_in(words, "lr") == value


def test_checkpoint_with_a_space_is_one_word():
    read = Template.of("--resume {checkpoint}", "--resume-arg", ["checkpoint"])
    assert read.into(["t.py"], VALUES) == ["t.py", "--resume", "a b.pt"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"resume": "--resume latest"}, "the template has no {checkpoint} or {step}"),
        ({"resume": "--resume {checkpoint"}, "cannot be read"),
        ({"resume": "--resume '{checkpoint}"}, "cannot be split into words"),
        ({"resume": "--resume {checkpoint.__class__}"}, "there is no placeholder"),
        ({"resume": "{checkpoint}", "lr": "--lr 0.1"}, "the template has no {lr}"),
        ({"resume": "{checkpoint}", "lr": "--lr {lr}"}, "the learning rate of the command is not"),
    ],
)
def test_template_that_cannot_work(arguments, said):
    with pytest.raises(UsageError, match=said.replace("{", "[{]").replace("}", "[}]")):
        Teller.of(["python", "train.py"], RestartOptions(arguments=arguments))


def test_where_the_learning_rate_comes_from(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("training:\n  lr: 3.0e-4\n  batch_size: 8\n")
    arguments = {"resume": "{checkpoint}", "lr": "--set training.lr={lr}"}
    command = ["python", "train.py", "--config", str(config)]
    assert Teller.of(command, RestartOptions(arguments=arguments)).lr == 3e-4
    assert Teller.of([*command, "training.lr=1"], RestartOptions(arguments=arguments)).lr == 3e-4
    given = [*command, "--set", "training.lr=0.01"]
    assert Teller.of(given, RestartOptions(arguments=arguments)).lr == 0.01
    assert Teller.of(given, RestartOptions(arguments=arguments, lr=0.5)).lr == 0.5


# Configurations.


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("c.yaml", "a:\n  lr: 1e-3 # x\n  from:\n", "a:\n  lr: 5.0e-4 # x\n  from: c/b.pt\n"),
        ("c.json", '{"a": {"lr": 0.001, "from": null}}', '{"a": {"lr": 5.0e-4, "from": "c/b.pt"}}'),
        ("c.toml", '[a]\nlr = 1e-3\nfrom = ""\n', '[a]\nlr = 5.0e-4\nfrom = "c/b.pt"\n'),
    ],
)
def test_configuration_of_an_attempt(tmp_path, monkeypatch, name, text, expected):
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text)
    keys = {"lr": Key.of("a.lr", "--lr-key", "lr"), "resume": Key.of("a.from", "", "checkpoint")}
    config = ConfigFile(name, keys)
    config.check(["t.py", f"--config={name}"])
    copy = config.write(Changes(2, "c/b.pt", None, 5e-4).values(), {"lr", "resume"}, "x", tmp_path)
    assert copy == name.replace(".", "_attempt2.")
    assert Path(copy).read_text() == expected
    assert Path(name).read_text() == text
    assert config.into(["t.py", f"--config={name}"], copy) == ["t.py", f"--config={copy}"]


def test_recoveries_with_one_configuration_do_not_share_copies(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text("from: null\n")
    config = ConfigFile("c.yaml", {"resume": Key.of("from", "--resume-key", "checkpoint")})
    copies = {
        checkpoint: config.write(Changes(2, checkpoint).values(), {"resume"}, "x", tmp_path)
        for checkpoint in ("a.pt", "b.pt", "c.pt")
    }
    assert [*copies.values()] == ["c_attempt2.yaml", "c_attempt2-2.yaml", "c_attempt2-3.yaml"]
    for checkpoint, copy in copies.items():
        assert Path(copy).read_text() == f"from: {checkpoint}\n"


def test_path_that_yaml_would_misread_is_quoted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text("from: null\n")
    config = ConfigFile("c.yaml", {"resume": Key.of("from", "--resume-key", "checkpoint")})
    copy = config.write(Changes(2, "a: b #c.pt").values(), {"resume"}, "x", tmp_path)
    assert Path(copy).read_text() == 'from: "a: b #c.pt"\n'


@pytest.mark.parametrize(
    ("keys", "command", "said"),
    [
        ({"resume": "model.from"}, ["t.py", "c.yaml"], "c.yaml has no single value at model.from"),
        ({"resume": "a"}, ["t.py", "c.yaml"], "has no single value at a"),
        ({"resume": "a.from={nothing}"}, ["t.py", "c.yaml"], "there is no placeholder .nothing"),
        ({"resume": "a.from"}, ["t.py"], "the command does not name c.yaml"),
    ],
)
def test_configuration_that_cannot_be_rewritten(tmp_path, monkeypatch, keys, command, said):
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text("a:\n  from: null\n")
    with pytest.raises(UsageError, match=said):
        Teller.of(command, RestartOptions(config="c.yaml", keys=keys))


def test_key_of_the_learning_rate_is_found(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("trainer:\n  lr: 5.0e-2\n  resume_milestone: 0\n")
    assert rate_key(str(path)) == "trainer.lr"
    path.write_text("g:\n  lr: 1.0e-2\nd:\n  lr: 1.0e-3\n")
    assert rate_key(str(path)) is None  # of two nobody knows which


# Checkpoints.


def save(path, value=1.0, extra=None):
    path.parent.mkdir(exist_ok=True, parents=True)
    torch.save({"model": {"w": torch.full((3,), value)}, **(extra or {})}, path)


def test_audit_goes_back_to_the_last_good_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for step in range(10, 310, 10):
        save(tmp_path / f"ckpt/step_{step}.pt", 1.0 if step < 120 else float("nan"))
    newest = tmp_path / "ckpt/step_300.pt"
    newest.write_bytes(newest.read_bytes()[:700])
    auditor = Auditor(Places.of("ckpt", ["t.py"], 0.0))
    found = auditor.look(2)
    assert [one.step for one in found.good[:2]] == [110, 100]
    assert found.all[-1].verdict is CheckpointVerdict.DAMAGED
    assert len(found.all) == 30
    assert (
        sum(one.verdict is CheckpointVerdict.UNREAD for one in found.all) > 10
    )  # halving, not reading all
    without = auditor.look(1, {found.good[0].key})
    assert without.good[0].step == 100
    save(tmp_path / "ckpt/step_110.pt", 2.0)  # written again: another one of the same name
    assert auditor.look(1, {found.good[0].key}).good[0].step == 110


def test_checkpoints_are_found_where_the_command_writes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "runs/old/step_1.pt")
    os.utime("runs/old/step_1.pt", (1, 1))
    extra = {"optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 1.0}]}}
    for step in (1, 2):
        save(tmp_path / f"runs/new/step_{step}.pt", extra=extra)
    for step in (1, 2, 3):
        save(tmp_path / f"runs/new/best_{step}.pt")
        save(tmp_path / f".venv/step_{step}.pt", extra=extra)
    save(tmp_path / "found/step-000001-rank0/batch.pt", extra={"more": torch.ones(999)})
    (tmp_path / "found/step-000001-rank0/incident.json").write_text("{}")
    found = Auditor(Places.of(None, ["t.py", "--save-dir", "runs"], 1000.0)).look(5)
    assert [one.path for one in found.all] == ["runs/new/step_1.pt", "runs/new/step_2.pt"]
    assert found.looked_at.startswith("runs, . (files written since the start")


# Endings.


def control_of(tmp_path, **notes):
    folder = tmp_path / "control"
    folder.mkdir()
    for name, told in notes.items():
        note = folder / name.replace("_", "-")
        note.write_text(told if isinstance(told, str) else json.dumps(told))
    return folder


RAISED = {"type": "KeyError", "message": "'x'", "file": "/a/t.py", "line": 3, "code": "d['x']"}


@pytest.mark.parametrize(
    ("code", "steps", "notes", "outcome"),
    [
        (0, 5, {}, RunEnding.DONE),
        (143, 5, {}, RunEnding.INTERRUPTED),
        (130, 0, {}, RunEnding.INTERRUPTED),
        (1, 5, {"interrupted": ""}, RunEnding.INTERRUPTED),
        (3, 0, {"stopped_1": "6 bad steps"}, RunEnding.STOPPED),
        (137, 5, {}, RunEnding.KILLED),
        (139, 5, {"ended_7": {"finite": True}}, RunEnding.KILLED),
        (1, 5, {}, RunEnding.KILLED),  # under a launcher: the process itself left no word
        (1, 5, {"ended_7": {"finite": True}}, RunEnding.FAILED),
        (1, 5, {"ended_7": {"finite": False}}, RunEnding.NON_FINITE),
        (1, 5, {"raised_7": RAISED}, RunEnding.FAILED),
        (1, 5, {"raised_7": {**RAISED, "message": "Loss is NaN, stopping"}}, RunEnding.NON_FINITE),
        (1, 5, {"raised_7": {**RAISED, "code": "assert isfinite(loss)"}}, RunEnding.NON_FINITE),
        (1, 5, {"raised_7": {**RAISED, "type": "FloatingPointError"}}, RunEnding.NON_FINITE),
        (1, 5, {"raised_7": {**RAISED, "message": "no information"}}, RunEnding.FAILED),
        (1, 5, {"raised_7": {**RAISED, "message": "Connection closed by peer"}}, RunEnding.KILLED),
        (1, 0, {"raised_7": RAISED}, RunEnding.NOT_BEGUN),
        (2, 0, {}, RunEnding.NOT_BEGUN),
    ],
)
def test_ending_is_told_by_what_was_left(tmp_path, monkeypatch, code, steps, notes, outcome):
    control = control_of(tmp_path, **notes)
    monkeypatch.setattr(os, "getpid", lambda: 7)
    heartbeat = Heartbeat(control)
    for step in range(steps):
        heartbeat.beat(step + 1)
    ending = read_ending(control, code, ())
    assert ending.outcome is outcome
    assert ending.tried == steps + (outcome in (RunEnding.STOPPED, RunEnding.NON_FINITE))


def test_bad_steps_are_those_that_were_noted(tmp_path, monkeypatch):
    """Incidents count otherwise: over all optimizers, or as a guard in the script does."""
    control = control_of(tmp_path, stopped_7="6 bad steps", bad_8="3\n4\nhalf a li")
    monkeypatch.setattr(os, "getpid", lambda: 7)
    heartbeat = Heartbeat(control)
    for step in range(6):
        heartbeat.bad(step) if step in (2, 4, 5) else None
        heartbeat.beat(step + 1)
    ending = read_ending(control, 3, ())
    # The last round was counted before its second optimizer met a bad step.
    assert (ending.bad, ending.tried, ending.bad_since) == ((2, 3, 4, 5), 6, 2)
    (control / "bad-8").write_text("".join(f"{step}\n" for step in range(100_000)))
    assert read_ending(control, 3, ()).bad[-1] == 99_999


def test_steps_are_told_apart_by_when_a_file_was_written(tmp_path):
    heartbeat = Heartbeat(tmp_path)
    for step in (1, 2, 2, 4):
        heartbeat.beat(step)
    (path,) = tmp_path.iterdir()
    steps = read_steps(path)
    assert (steps.pid, steps.count, len(steps.times)) == (os.getpid(), 4, 4)
    known = Steps(1, 3, (10.0, 20.0, 30.0))
    assert [known.until(moment) for moment in (5.0, 10.0, 25.0, 99.0)] == [0, 1, 2, 3]
    assert Steps(1, 300_000, (10.0, 20.0)).until(5.0) is None
    assert Steps(1, 300_000, (10.0, 20.0)).until(15.0) == 299_999
    (tmp_path / "steps-9").write_bytes(b"cut off")
    assert read_steps(tmp_path / "steps-9") is None


def test_full_disk_is_met_before_steps_are_counted(tmp_path):
    """A page of a file that has no place on the disk yet would end the process."""
    Heartbeat(tmp_path).beat(1)
    (path,) = tmp_path.iterdir()
    told = path.stat()
    assert told.st_blocks * 512 >= told.st_size > 1 << 20


# Decisions.


def judged(step, verdict=CheckpointVerdict.GOOD):
    return Judged(f"c/{step}.pt", step, ((f"c/{step}.pt", 1, step),), verdict)


def found(*steps, bad=()):
    every = [judged(step) for step in steps] + [
        judged(step, CheckpointVerdict.POISONED) for step in bad
    ]
    return Audited(tuple(every), "c")


def ended(outcome, raised="", steps=5):
    made = None if steps is None else Steps(1, steps, ())
    return Ending(outcome, 1, "it ended", made, steps or 1, raised)


def without_aside(ladder, audited):
    kept = tuple(one for one in audited.all if one.key not in ladder.aside)
    return Audited(kept, "c")


def test_numbers_cut_then_cut_more_then_go_back():
    ladder = Ladder(9, 0.5, Means(lr=True))
    told = []
    for _ in range(5):
        decision = ladder.after(ended(RunEnding.STOPPED), without_aside(ladder, found(1, 2, 3, 4)))
        told.append((decision.checkpoint.step, decision.factor, decision.level))
    assert [step for step, _, _ in told] == [4, 4, 3, 2, 1]
    assert [factor for _, factor, _ in told[:3]] == [2**-1, 2**-3, 2**-6]
    assert [level for _, _, level in told] == [0, 1, 2, 3, 4]


def test_progress_begins_the_ladder_anew():
    ladder = Ladder(9, 0.5, Means(lr=True))
    ladder.after(ended(RunEnding.STOPPED), found(1))
    ladder.after(ended(RunEnding.STOPPED), found(1))
    decision = ladder.after(ended(RunEnding.STOPPED), found(1, 2))
    assert (decision.checkpoint.step, decision.level, decision.factor) == (2, 0, 2**-4)


def test_kill_changes_nothing_however_often():
    ladder = Ladder(4, 0.5, Means(lr=True, skip=True))
    for _ in range(4):
        decision = ladder.after(ended(RunEnding.KILLED), found(1, 2))
        assert decision == Restart(judged(2), changed=False, level=0, factor=1.0, seed=0)
    assert ladder.after(ended(RunEnding.KILLED), found(1, 2)) == End(
        "4 restarts spent, and no more are allowed"
    )


def test_failure_is_given_one_chance_and_then_taken_for_numbers():
    ladder = Ladder(9, 0.5, Means(lr=True))
    factors = [ladder.after(ended(RunEnding.FAILED), found(1, 2)).factor for _ in range(3)]
    assert factors == [1.0, 0.5, 0.125]


def test_same_exception_twice_is_a_fault_of_the_code():
    ladder = Ladder(9, 0.5, Means(lr=True))
    assert isinstance(ladder.after(ended(RunEnding.FAILED, "KeyError t.py:3"), found(1)), Restart)
    assert isinstance(ladder.after(ended(RunEnding.FAILED, "KeyError t.py:9"), found(1)), Restart)
    decision = ladder.after(ended(RunEnding.FAILED, "KeyError t.py:9"), found(1))
    assert "for the second time: a restart does not help" in decision.why


def test_where_nothing_can_be_changed_older_ones_are_tried_and_then_no_more():
    ladder = Ladder(9, 0.5, Means())
    steps = []
    while isinstance(
        decision := ladder.after(ended(RunEnding.STOPPED), without_aside(ladder, found(1, 2))),
        Restart,
    ):
        steps.append(decision.checkpoint.step)
    assert steps == [2, 1]
    assert "give --lr-arg or --skip-arg" in decision.why


def test_checkpoint_that_leads_to_bad_steps_only_is_left_behind():
    """Finite weights can be as broken: half of the older ones are left out, then most of them."""
    ladder = Ladder(9, 0.5, Means(lr=True))
    every = found(*range(1, 12))
    hopeless = Ending(RunEnding.STOPPED, 3, "", Steps(1, 9, ()), 10, bad=tuple(range(10)))
    told = [ladder.after(ended(RunEnding.STOPPED), every)]
    for _ in range(2):
        ladder.aside |= ladder.leave_behind(without_aside(ladder, every))
        told += [ladder.after(hopeless, without_aside(ladder, every))]
    assert [one.checkpoint.step for one in told] == [11, 5, 1]
    assert [one.factor for one in told] == [0.5] * 3  # it says nothing about the learning rate
    ladder.aside |= ladder.leave_behind(without_aside(ladder, every))
    decision = ladder.after(hopeless, without_aside(ladder, every))
    assert decision.why.startswith("no step was good from any")


@pytest.mark.parametrize(
    ("bad", "tried", "since", "hopeless"),
    [
        ((), 26, 25, False),
        ((25,), 26, 25, False),
        ((3, 40, 45, 60, 61), 62, 40, False),
        ((3, 4, 5), 30, 29, False),
        ((0, 1, 2, 5), 6, 0, True),
        ((0,), 1, 0, False),
    ],
)
def test_trouble_begins_with_the_first_of_the_last_bad_steps(bad, tried, since, hopeless):
    ending = Ending(RunEnding.STOPPED, 3, "", None, tried, bad=bad)
    assert (ending.bad_since, ending.hopeless) == (since, hopeless)


@pytest.mark.parametrize(
    ("audited", "own_bad", "restarted"),
    [
        (found(), False, False),
        (found(1), False, False),
        (found(1, bad=[2]), False, True),  # it may have resumed from the newest by itself
        (found(1), True, True),
        (found(bad=[2]), True, False),
    ],
)
def test_command_that_did_not_begin(audited, own_bad, restarted):
    ladder = Ladder(3, 0.5, Means(lr=True), own_bad=own_bad)
    decision = ladder.after(ended(RunEnding.NOT_BEGUN, steps=None), audited)
    assert isinstance(decision, Restart) is restarted


def test_bad_checkpoint_of_the_commands_own_is_not_gone_back_to():
    ladder = Ladder(3, 0.5, Means(lr=True), own_bad=True)
    decision = ladder.after(ended(RunEnding.STOPPED, steps=None), found(bad=[2]))
    assert "there is no good checkpoint (1 checkpoint: 1 with bad numbers)" in decision.why


def test_data_is_passed_over_from_the_checkpoint_to_behind_the_bad_step():
    positions = Positions(first=0.0, began=0.0)
    first = Ending(RunEnding.STOPPED, 3, "", Steps(1, 25, tuple(map(float, range(1, 26)))), 26)
    checkpoint = Judged("c/20.pt", 20, (("c/20.pt", 1, 20_500_000_000),))
    positions.attempt_ended(first, [checkpoint])
    assert positions.of(checkpoint) == 20
    assert positions.lost(first, 20) == 6
    late = Judged("c/25.pt", 25, (("c/25.pt", 1, 25_500_000_000),))
    positions.attempt_ended(first, [late])
    assert positions.after_trouble(first, [checkpoint, late]) == []
    trouble = Ending(RunEnding.STOPPED, 3, "", first.steps, 26, bad=(22, 23, 24, 25))
    assert positions.after_trouble(trouble, [checkpoint, late]) == [late]
    positions.pass_over(first, 20, 0)
    assert positions.skip_from(20) == 6
    positions.begin(checkpoint, 20, 6)
    second = Ending(RunEnding.STOPPED, 3, "", None, 1)  # the very next batch is bad, too
    assert positions.end_of(second) == 27
    positions.pass_over(second, 20, 1)
    assert positions.skip_from(20) == 14  # as much again beyond it


@pytest.mark.parametrize(
    ("step", "position"), [(20, 20), (21, 21), (25, 20), (3, 20), (None, 20), (19, 20)]
)
def test_count_of_a_checkpoint_is_believed_where_it_fits(step, position):
    """An epoch is no step, and by the clock the last steps before a file may be missing."""
    positions = Positions(first=0.0, began=0.0)
    ending = Ending(RunEnding.KILLED, 137, "", Steps(1, 25, tuple(map(float, range(1, 26)))), 25)
    checkpoint = Judged("c/x.pt", step, (("c/x.pt", 1, 20_500_000_000),))
    positions.attempt_ended(ending, [checkpoint])
    assert positions.of(checkpoint) == position


# The record, and processes.


def test_record_is_one_whole_line_each(tmp_path):
    for number in (1, 2):
        line = lineage.Line(
            attempt=number,
            started="a",
            ended="b",
            command=["x", "\udcff"],
            checkpoint=None,
            step=None,
            changes={},
            reason="line\nbreak",
            outcome="killed",
            code=137,
            steps=3,
        )
        lineage.append(tmp_path / "new", line)
    lines = (tmp_path / "new/lineage.jsonl").read_text().splitlines()
    assert [json.loads(line)["attempt"] for line in lines] == [1, 2]
    assert json.loads(lines[0])["schema"] == "nanguard.lineage/1"


def test_everything_below_a_process_is_ended():
    """A grandchild in a session of its own, which does not listen to SIGTERM either."""
    code = (
        "import signal, subprocess, sys, time; subprocess.Popen([sys.executable, '-c', "
        "'import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); "
        "time.sleep(60)'], start_new_session=True); time.sleep(60)"
    )
    probe = (
        "import subprocess, sys; sys.path[:0] = sys.argv[2:]; "
        "from nanguard.run import children; children.PATIENCE = 0.5; children.adopt_orphans(); "
        "p = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdout=subprocess.PIPE); "
        "p.stdout.readline(); p.kill(); p.wait(); "
        "print(children.end_descendants(), children.descendants())"
    )
    command = [sys.executable, "-c", probe, code, *sys.path]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "[]"]
    assert callable(adopt_orphans)
    assert callable(end_descendants)
    assert isinstance(descendants(), list)


def test_process_whose_name_ends_inside_a_character():
    """The system cuts names after 15 bytes."""
    name = "\\303\\244" * 7 + "\\303"
    code = f"printf '{name}' > /proc/$$/comm; echo named; read end"
    child = subprocess.Popen(
        ["sh", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with child:
        assert child.stdout.readline() == "named\n"
        assert child.pid in descendants()
        child.communicate("end")


def test_command_is_waited_for_where_python_knows_no_waitid(monkeypatch):
    monkeypatch.delattr(os, "waitid")
    assert wait_for(subprocess.Popen([sys.executable, "-c", "raise SystemExit(5)"])) == 5
