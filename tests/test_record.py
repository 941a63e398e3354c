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
from nanguard.snapshots import disk
from nanguard.snapshots.disk import DiskSnapshots
from nanguard.testing.faults import inject
from tests.training import Net, Run, batches, differences, poisoned

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
from nanguard.snapshots import disk
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


def steps_of(folder: Path) -> list[int]:
    return [line["step"] for line in lines(folder / "metrics.jsonl")]


def train(
    run: Run, guard: Guard, data: list[Any], epochs: int, *, until: int | None = None
) -> None:
    """Trains to the end, or until so many steps were made, as if it were killed then."""
    while guard.epoch < epochs:
        for batch in guard.watch(data):
            guard.backward(run.loss(batch))
            guard.step(max_norm=1.0)
            if guard.steps == until:
                return
        guard.end_epoch()


@pytest.mark.parametrize(
    ("killed_after", "lag"), [(7, 0), (8, 2), (9, 0), (9, 2), (10, 0), (19, 2)]
)
def test_a_resumed_run_has_every_step_and_every_epoch_once(
    tmp_path: Path, killed_after: int, lag: int
):
    """Killed between snapshots, at one, and around the ends of epochs of eight steps."""
    data = batches(8)
    first = Run()
    guard = first.make_guard(run_dir=tmp_path, lag=lag, snapshot_every=3, disk_every=3)
    train(first, guard, data, 3, until=killed_after)
    guard._recovery.close()
    guard._parts.journal.record.flush()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "lo')  # it was writing just then
    second = Run()
    guard = second.make_guard(run_dir=tmp_path, lag=lag, snapshot_every=3, disk_every=3)
    assert guard.resume()
    train(second, guard, data, 3)
    guard.close()
    assert steps_of(tmp_path) == list(range(24))
    with (tmp_path / "training_history.csv").open() as file:
        assert [row["epoch"] for row in csv.DictReader(file)] == ["1", "2", "3"]
    whole = Run()
    guard = whole.make_guard(run_dir=tmp_path / "whole", lag=lag, snapshot_every=3, disk_every=3)
    train(whole, guard, data, 3)
    guard.close()
    assert not differences(whole.model.state_dict(), second.model.state_dict())
    losses = [
        [m["loss"] for m in lines(p / "metrics.jsonl")] for p in (tmp_path, tmp_path / "whole")
    ]
    assert losses[0] == losses[1]


def test_what_was_written_after_the_snapshot_is_put_aside_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    later = DiskSnapshots.write_later

    def at_once(disk: DiskSnapshots, snapshot: Any) -> bool:
        written = later(disk, snapshot)
        disk.close()
        return written

    # A machine that is busy may leave one out.
    monkeypatch.setattr(DiskSnapshots, "write_later", at_once)
    run = Run()
    guard = run.make_guard(run_dir=tmp_path, snapshot_every=4, disk_every=4)
    train(run, guard, poisoned(batches(20), (9,)), 1, until=11)
    guard._recovery.close()
    guard._parts.journal.record.flush()
    for _ in range(2):  # from the same snapshot twice
        again = Run()
        guard = again.make_guard(run_dir=tmp_path, snapshot_every=0, disk_every=4)
        assert guard.resume()
        guard.close()
    assert steps_of(tmp_path) == list(range(8))
    aside = lines(tmp_path / ".superseded.jsonl")
    assert [line["step"] for line in aside if "loss" in line] == [8, 9, 10]
    assert [line["step"] for line in aside if line.get("name") == "non-finite-loss"] == [9]
    events = lines(tmp_path / "events.jsonl")
    assert [line["message"] for line in events if line["name"] == "resumed"] == [
        "resumed after update 8; 3 steps after it will be made again",
        "resumed after update 8",
    ]
    assert "non-finite-loss" not in [line["name"] for line in events]


def test_a_snapshot_counts_only_when_its_steps_are_in_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Looked at whenever a snapshot gets its name, while lines are only written now and then."""
    monkeypatch.setattr("nanguard.record._FLUSH_SECONDS", 1000.0)
    seen: list[tuple[int, int]] = []
    rename = disk._flush

    def look(path: Path) -> None:
        rename(path)
        for snapshot in disk.finished(tmp_path / "snapshots"):
            update = int(snapshot.name.rpartition("-")[2])
            seen.append((update, len(steps_of(tmp_path))))

    monkeypatch.setattr(disk, "_flush", look)
    run = Run()
    guard = run.make_guard(run_dir=tmp_path, snapshot_every=2, disk_every=2, keep=9)
    for batch in guard.watch(batches(9)):
        guard.backward(run.loss(batch))
        guard.step(max_norm=1.0)
        guard._recovery.disk.close()
    guard.close()
    assert {update for update, _ in seen} >= {2, 4}
    assert all(written >= update for update, written in seen), seen


def test_your_own_checkpoint_puts_the_record_back_as_well(tmp_path: Path):
    run = Run()
    guard = run.make_guard(run_dir=tmp_path)
    data, state = batches(10), {}
    for batch in guard.watch(data):
        guard.backward(run.loss(batch))
        guard.step(max_norm=1.0)
        if guard.steps == 6:
            state = guard.state_dict()
    guard.close()
    guard = Run().make_guard(run_dir=tmp_path)
    guard.load_state_dict(state)
    guard.close()
    assert steps_of(tmp_path) == list(range(6))


def test_a_run_that_was_killed_before_its_first_snapshot_begins_its_record_anew(tmp_path: Path):
    for killed_after in (3, None):
        run = Run()
        guard = run.make_guard(run_dir=tmp_path, snapshot_every=5, disk_every=5)
        assert not guard.resume()
        train(run, guard, batches(8), 1, until=killed_after)
        guard._parts.journal.record.flush()
        guard._parts.journal.record.close()
    assert steps_of(tmp_path) == list(range(8))
