"""Every kind of run becomes the same model, and what cannot be read is said."""

from __future__ import annotations

import json
import math
import os

import pytest

from nanguard.errors import SourceError
from nanguard.view.runs import Axis, EventKind, Panel, find_below, find_runs, open_runs
from tests.nobody import as_nobody, open_folder
from tests.view.runs.runs import write_incident, write_record


def read(*paths):
    runs = open_runs([str(path) for path in paths])
    assert len(runs) == 1
    return runs[0]


def names(run, panel):
    return [curve.name for curve in run.of(panel)]


def test_record_of_the_guard(tmp_path):
    write_record(tmp_path / "night")
    write_incident(tmp_path / "night" / "incidents", 40)
    (tmp_path / "night" / "config.yaml").write_text("lr: 1e-4\napi_key: abcdef0123456789abcd\n")
    run = read(tmp_path / "night")
    assert run.name == "night"
    assert run.axis is Axis.STEP
    assert names(run, Panel.LOSS) == ["loss", "val_loss"]
    assert names(run, Panel.TERMS) == ["text", "latent"]
    assert names(run, Panel.GRAD_NORM) == ["grad_norm"]
    assert names(run, Panel.RATE) == ["lr"]
    assert names(run, Panel.SCALE) == ["scale"]
    loss = run.main()
    assert loss.name == "loss"
    assert [n for n, v in enumerate(loss.values) if not math.isfinite(v)] == [40, 41, 42]
    text = run.of(Panel.TERMS)[0]
    assert list(text.xs)[:3] == [0, 1, 2]
    assert math.isnan(text.values[41])
    assert text.values[43] == pytest.approx(loss.values[43])
    # Rows of epochs stand at the last step of their epoch.
    assert list(run.of(Panel.LOSS)[1].xs) == [59, 119]
    assert [(e.kind, e.step) for e in run.events] == [
        (EventKind.INCIDENT, 40),
        (EventKind.SKIP, 40),
        (EventKind.SKIP, 41),
        (EventKind.SKIP, 42),
    ]
    assert run.events[0].incident == 0
    assert run.events[1].reason == "bad step"
    assert run.clock.seconds == 119
    assert run.environment["command"] == "python train.py --lr 1e-3"
    assert run.configuration["config.yaml"] == "lr: 1e-4\napi_key: (hidden)\n"
    assert run.problems == []


def test_secrets_are_hidden(tmp_path):
    write_record(tmp_path)
    (tmp_path / "train_config.yaml").write_text("lr: 0.1\nwandb: {api_key: 0123456789}\n")
    command = ["python", "train.py", "--api-key", "hunter2", "--lr", "0.1"]
    write_incident(tmp_path / "incidents", 40, run={"command": command})
    run = read(tmp_path)
    assert run.configuration["train_config.yaml"] == "lr: 0.1\nwandb: {api_key: (hidden)}\n"
    assert run.environment["command"] == "python train.py --api-key (hidden) --lr 0.1"


def test_text_log_by_name(tmp_path):
    path = tmp_path / "train.log"
    path.write_text("".join(f"step {n} loss {5 - n / 10:.3f} lr 1e-4\n" for n in range(20)))
    run = read(path)
    assert run.name == "train.log"
    assert names(run, Panel.LOSS) == ["loss"]
    assert list(run.main().xs) == list(range(20))


def test_log_of_epochs(tmp_path):
    path = tmp_path / "train.log"
    lines = [f"Epoch {n}/5 | Train Loss: {3 - n / 4} | Val Loss: nan" for n in range(1, 6)]
    path.write_text("\n".join(lines))
    run = read(path)
    assert run.axis is Axis.EPOCH
    assert list(run.main().xs) == [1, 2, 3, 4, 5]


def test_several_paths_are_several_runs(tmp_path):
    for name in ("a", "b"):
        write_record(tmp_path / name)
    assert [run.name for run in open_runs([tmp_path / "a", tmp_path / "b"])] == ["a", "b"]
    assert [run.name for run in find_below(tmp_path)] == ["a", "b"]


def test_logs_in_one_folder_are_runs_of_their_own(tmp_path):
    for name in ("one.log", "two.log"):
        (tmp_path / name).write_text("step 1 loss 2.0\nstep 2 loss 1.0\n")
    found = find_runs([tmp_path])
    assert [run.name for run in found] == [f"{tmp_path.name}/one.log", f"{tmp_path.name}/two.log"]


def test_log_beside_the_record_is_named_and_not_mixed_in(tmp_path):
    write_record(tmp_path)
    (tmp_path / "train.log").write_text("step 1 loss 2.0\nstep 2 loss 1.0\n")
    run = read(tmp_path)
    assert names(run, Panel.LOSS) == ["loss", "val_loss"]
    assert run.problems == ["not shown, because it lies beside metrics.jsonl: train.log"]


def test_incidents_and_reports_beside_a_log_belong_to_it(tmp_path):
    log = tmp_path / "train.log"
    log.write_text("step 1 loss 2.0\nstep 2 loss 1.0\n")
    folder = write_incident(tmp_path / "i", 2)
    report = tmp_path / "check.json"
    finding = {"code": "SRC001", "name": "x", "severity": "error", "message": "m", "fixes": []}
    report.write_text(json.dumps({"schema": "nanguard.report/1", "findings": [finding]}))
    run = read(log, folder, report)
    assert run.name == "train.log"
    assert len(run.incidents) == 1
    assert run.findings == [finding]


def test_incidents_alone_show_the_losses_before(tmp_path):
    write_incident(tmp_path / "20261115", 40)
    run = read(tmp_path / "20261115")
    curve = run.main()
    assert list(curve.xs) == [37, 38, 39, 40]
    assert list(curve.values)[:3] == [2.5, 2.4, 2.3]
    assert math.isnan(curve.values[3])
    assert run.incidents[0].folder.name == "step-000040-rank0"


def test_lineage_is_restarts(tmp_path):
    write_record(tmp_path)
    lines = [
        {
            "attempt": 2,
            "checkpoint": "ck/100",
            "step": 100,
            "changes": {"lr": 5e-5},
            "reason": "nan",
        },
        {"attempt": 3, "checkpoint": None, "step": 0, "changes": None, "outcome": "finished"},
    ]
    (tmp_path / "lineage.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    events = [e for e in read(tmp_path).events if e.kind is EventKind.RESTART]
    assert [(e.step, e.text, e.reason) for e in events] == [
        (0, "attempt 3 -> finished", ""),
        (100, "attempt 2 from ck/100 with lr: 5e-05", "nan"),
    ]


def test_two_runs_in_one_file(tmp_path):
    path = tmp_path / "train.log"
    line = "step {} loss {:.2f}\n"
    path.write_text("".join(line.format(n, 5 - n / 10) for n in [*range(20), *range(20)]))
    run = read(path)
    (event,) = [e for e in run.events if e.kind is EventKind.RESTART]
    assert event.step == 0
    assert event.text.startswith("after step 19 the log goes on with step 0")


def test_steps_out_of_order_are_put_in_order(tmp_path):
    path = tmp_path / "train.jsonl"
    steps = [n ^ 1 for n in range(400)]
    path.write_text("".join(f'{{"step": {n}, "loss": {n}.5}}\n' for n in steps))
    run = read(path)
    assert list(run.main().xs) == list(range(400))
    assert list(run.main().values)[:3] == [0.5, 1.5, 2.5]
    assert run.problems == ["the steps of 1 of 1 curves are out of order; they are shown in order"]


def test_clock_that_goes_back(tmp_path):
    write_record(tmp_path)
    text = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(text.replace('"time":1700000090', '"time":1600000090'))
    run = read(tmp_path)
    assert run.problems == ["the clock goes back at step 90; times after it may be wrong"]
    assert not run.clock.steady


@pytest.mark.parametrize(
    ("record", "known"),
    [
        ({"step": 0, "time": 1.7e9}, True),
        ({"_step": 0, "_timestamp": 1.7e9}, True),
        ({"global_step": 0, "wall_time": 1.7e9}, True),
        # The time that a step took, and a time of day.
        ({"step": 0, "time": 0.31}, False),
        ({"step": 0, "time": "12:30:01"}, False),
    ],
)
def test_clock_of_a_log_that_others_wrote(tmp_path, record, known):
    path = tmp_path / "train.jsonl"
    lines = [{**record, "loss": 2.0, next(iter(record)): n} for n in range(20)]
    for n, line in enumerate(lines):
        key = list(record)[1]
        line[key] = record[key] + n if isinstance(record[key], float) else record[key]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read(path)
    assert run.clock.steady is known
    assert (run.clock.seconds == 19) is known


@pytest.mark.parametrize("content", ["", "\n", "hello\n"])
def test_empty_log_is_an_empty_run(tmp_path, content):
    path = tmp_path / "train.log"
    path.write_text(content)
    run = read(path)
    assert run.curves == []
    assert run.main() is None


def test_record_that_ended_before_its_first_step(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "events.jsonl").write_text("")
    assert read(tmp_path).curves == []


def test_only_nan_and_one_point(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"step": 1, "loss": NaN}\n' * 2 + '{"step": 2, "loss": NaN}\n'
    )
    run = read(tmp_path / "a.jsonl")
    assert len(run.main()) == 3
    (tmp_path / "b.csv").write_text("step,loss\n1,2.5\n")
    assert list(read(tmp_path / "b.csv").main().values) == [2.5]


def test_damaged_files_are_said(tmp_path):
    write_record(tmp_path)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write(
            "{half a li\n" + "x" * 70_000 + "\n" + '{"name": "lr-restored", "step": 50}\n{"na'
        )
    folder = write_incident(tmp_path / "incidents")
    (folder / "incident.json").write_text("{")
    run = read(tmp_path)
    assert run.events[-1].kind is EventKind.LR_RESTORED
    assert run.problems[0].startswith("incident.json: incident.json is not complete JSON")
    assert (
        run.problems[1] == "2 lines of events.jsonl could not be read: not a complete JSON object"
    )


def test_terms_of_changing_shape(tmp_path):
    write_record(tmp_path, steps=3, bad=range(0))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step":3,"loss":1.0,"terms":{"latent":"inf","kl":0.5},"time":1}\n')
        file.write('{"step":4,"loss":1.0,"terms":{"text":1.5},"tim')
    run = read(tmp_path)
    terms = {curve.name: (list(curve.xs), list(curve.values)) for curve in run.of(Panel.TERMS)}
    assert terms["latent"] == ([0, 1, 2, 3], [0.25, 0.25, 0.25, math.inf])
    assert terms["kl"] == ([3], [0.5])
    assert terms["text"][0] == [0, 1, 2]


def test_many_events_are_told_together(tmp_path):
    write_record(tmp_path, steps=10, bad=range(0))
    line = '{{"action": "skip", "name": "non-finite-loss", "step": {}, "message": "m"}}\n'
    (tmp_path / "events.jsonl").write_text("".join(line.format(n) for n in range(5000)))
    run = read(tmp_path)
    assert len(run.events) <= 2000
    assert sum(event.count for event in run.events) == 5000
    assert run.events[-1].last == 4999


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "there is no such file or folder."),
        ("empty", "there is no run here: no log, no incident and no report."),
        ("model.bin", "this is not a log, an incident or a report."),
    ],
)
def test_what_is_no_run(tmp_path, name, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.bin").write_bytes(b"\0\1\2\3" * 100)
    with pytest.raises(SourceError) as caught:
        find_runs([tmp_path / name])
    assert caught.value.what == message
    assert caught.value.where == str(tmp_path / name)


def test_no_permission():
    with open_folder() as folder:
        path = folder / "train.log"
        path.write_text("step 1 loss 2.0\n")
        path.chmod(0)
        said = r"it cannot be read \(Permission denied\)"
        with as_nobody(), pytest.raises(SourceError, match=said):
            find_runs([path])


@pytest.mark.parametrize("name", ["theirs", "incidents"])
def test_folder_of_others_does_not_hide_the_rest(name):
    with open_folder() as folder:
        write_record(folder / "mine")
        (folder / name).mkdir(mode=0o700)
        with as_nobody():
            assert [run.name for run in find_runs([folder])] == ["mine"]


def test_links_in_a_circle_and_pipes(tmp_path):
    write_record(tmp_path / "a")
    (tmp_path / "a" / "back").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "a" / "pipe.log")
    assert [run.name for run in find_below(tmp_path)] == ["a"]


@pytest.mark.parametrize("steps", [5, 3000, 9000])
def test_clock_of_a_long_run_goes_forward(tmp_path, steps):
    write_record(tmp_path, steps=steps, bad=range(0))
    run = read(tmp_path)
    assert run.problems == []
    assert run.clock.seconds == steps - 1
    assert list(run.clock.steps) == sorted(set(run.clock.steps))


def test_clock_with_an_evaluation_at_the_same_step(tmp_path):
    path = tmp_path / "train.jsonl"
    with path.open("w") as file:
        for n in range(12_000):
            told = {"step": n // 2, ("loss", "eval_loss")[n % 2]: 1.0, "time": 1.7e9 + n}
            file.write(json.dumps(told) + "\n")
    clock = read(path).clock
    assert clock.steady
    assert clock.steps[-1] == 5999


def test_clock_of_many_short_lines_reaches_the_end(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text(
        "".join(f'{{"step":{n},"loss":1,"time":{1_700_000_000 + n}}}\n' for n in range(9500))
    )
    assert path.stat().st_size < 400_000 + 30_000
    assert read(path).clock.steps[-1] == 9499
