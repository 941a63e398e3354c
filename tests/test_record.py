"""The run record: valid JSON on every line, nothing hidden, never in the way."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F

from nanguard import Guard, Settings
from nanguard.record import RunRecord
from nanguard.testing import inject
from tests.training import Net, Run, batches, poisoned

if TYPE_CHECKING:
    from pathlib import Path


def lines(path: Path) -> list[dict[str, Any]]:
    def refuse(name: str) -> float:
        raise ValueError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("lag", [0, 2])
def test_one_line_per_step_in_order_with_what_was_done(tmp_path: Path, lag: int):
    run = Run()
    guard = run.make_guard(run_dir=tmp_path, lag=lag)
    with inject(guard, "inf", into="loss", term="latent", step=4):
        for x, y in guard.watch(poisoned(batches(10), (7,))):
            out = run.model(x)
            loss = guard.loss(text=F.cross_entropy(out, y), latent=0.1 * out.pow(2).mean())
            guard.backward(loss)
            guard.step(max_norm=1.0)
    guard.close()
    metrics = lines(tmp_path / "metrics.jsonl")
    assert [m["step"] for m in metrics] == list(range(10))
    assert [m["action"] for m in metrics] == [
        *(["step"] * 4),
        "skip",
        *(["step"] * 2),
        "skip",
        *(["step"] * 2),
    ]
    assert metrics[4]["terms"]["latent"] == "inf"
    assert metrics[4]["loss"] == "inf"
    assert metrics[7]["loss"] == "nan"
    assert metrics[5]["update"] == 4
    for line in (metrics[0], metrics[9]):
        assert math.isfinite(line["loss"])
        assert math.isclose(sum(line["terms"].values()), line["loss"], rel_tol=1e-5)
        assert line["grad_norm"] > 0
        assert line["lr"] > 0
        assert abs(line["time"] - time.time()) < 60
    events = lines(tmp_path / "events.jsonl")
    assert [(e["step"], e["name"], e["action"]) for e in events] == [
        (4, "non-finite-loss", "skip"),
        (7, "non-finite-loss", "skip"),
    ]
    assert events[0]["where"] == "loss term 'latent'"
    assert events[0]["code"] == "RUN001"


def test_the_loss_scale_is_recorded(tmp_path: Path):
    model = Net()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    guard = Guard(model, torch.optim.AdamW(model.parameters()), scaler=scaler, run_dir=tmp_path)
    for x, y in guard.watch(batches(2)):
        guard.backward(F.cross_entropy(model(x), y))
        guard.step()
    guard.close()
    assert [m["scale"] for m in lines(tmp_path / "metrics.jsonl")] == [64.0, 64.0]


def test_the_history_has_a_row_per_epoch_and_new_columns_where_names_are_new(tmp_path: Path):
    record = RunRecord(tmp_path, on_failure=print)
    record.epoch({"epoch": 1, "train_loss": 0.5})
    record.epoch({"epoch": 2, "train_loss": float("nan"), "val_acc": 0.25})
    record.close()
    with (tmp_path / "training_history.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows == [
        {"epoch": "1", "train_loss": "0.5", "val_acc": ""},
        {"epoch": "2", "train_loss": "nan", "val_acc": "0.25"},
    ]


def test_the_mean_training_loss_is_over_applied_steps_only(tmp_path: Path):
    model = Net()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.0), run_dir=tmp_path)
    for index, (x, _) in enumerate(guard.watch(batches(4))):
        level = [1.0, float("nan"), 3.0, 5.0][index]
        guard.backward(0 * model(x).sum() + level)
        guard.step()
    guard.end_epoch()
    guard.close()
    assert "\n1,3.0" in (tmp_path / "training_history.csv").read_text().replace("\r", "")


def test_a_record_that_cannot_be_written_reports_once_and_counts_what_is_lost(tmp_path: Path):
    failures: list[str] = []
    record = RunRecord(tmp_path, on_failure=failures.append)
    (tmp_path / "metrics.jsonl").mkdir()  # in the way
    record.metric({"step": 1})
    time.sleep(0.6)
    record.metric({"step": 2})
    record.event({"step": 2, "loss": float("inf")})
    record.close()
    assert record.lost == 2
    assert len(failures) == 1
    assert "Is a directory" in failures[0]
    assert lines(tmp_path / "events.jsonl")[0]["loss"] == "inf"


def test_half_a_line_left_by_a_failed_write_spoils_only_itself(tmp_path: Path):
    record = RunRecord(tmp_path, on_failure=lambda _message: None)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0')
    record._torn.add("metrics.jsonl")
    record.metric({"step": 1})
    record.close()
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == ['{"step": 0', '{"step":1}']


LEAVES = """
import sys
from pathlib import Path
from nanguard.record import RunRecord
record = RunRecord(Path(sys.argv[1]), on_failure=print)
for step in range(1000):
    record.metric({"step": step})
"""


def test_a_program_that_ends_without_closing_loses_no_line(tmp_path: Path):
    subprocess.run([sys.executable, "-c", LEAVES, str(tmp_path)], check=True, timeout=60)
    assert [m["step"] for m in lines(tmp_path / "metrics.jsonl")] == list(range(1000))


def test_a_run_that_is_killed_keeps_what_is_older_than_a_moment(tmp_path: Path):
    record = RunRecord(tmp_path, on_failure=print)
    record.metric({"step": 0})
    deadline = time.monotonic() + 10
    while not (tmp_path / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 0}]
    record.close()


def test_a_run_that_is_resumed_appends(tmp_path: Path):
    for _ in range(2):
        record = RunRecord(tmp_path, on_failure=print)
        record.metric({"step": 1})
        record.close()
    assert len(lines(tmp_path / "metrics.jsonl")) == 2


def test_settings_can_be_written_down():
    assert Settings(max_skips=9).to_json()["max_skips"] == 9
