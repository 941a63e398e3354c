"""Runs: which checkpoint is the last good one, also where there are hundreds, or ever more."""

from __future__ import annotations

import functools
import operator
import threading
import time
from typing import TYPE_CHECKING

import pytest

from nanguard.check.checkpoint import checkpoint_reader
from nanguard.check.checkpoint.checkpoint_reader import (
    PATIENCE,
    CheckpointWatcher,
    open_sources,
    watch,
)
from nanguard.check.checkpoint.checkpoint_rule import HEALTHY, NAN, safetensors
from nanguard.check.scan import Scan

if TYPE_CHECKING:
    from pathlib import Path

    from nanguard.check.checkpoint.checkpoint import Checkpoint

GOOD, BAD = safetensors(HEALTHY), safetensors({"head.weight": (0.1, NAN)})


def written(folder: Path, bad: set[int], count: int = 100) -> None:
    for step in range(count):
        (folder / f"step_{step}.safetensors").write_bytes(BAD if step in bad else GOOD)


@pytest.fixture
def read_files() -> list[str]:
    return []


@pytest.fixture
def scan(read_files: list[str]) -> Scan:
    return Scan(progress=lambda path, read: read_files.append(path))


@pytest.mark.parametrize("first", [0, 1, 37, 99])
def test_the_first_bad_one_of_hundreds_is_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scan: Scan, read_files: list[str], first: int
):
    monkeypatch.setattr(checkpoint_reader, "MANY_BYTES", 0)
    written(tmp_path, set(range(first, 100)))
    found = list(open_sources([tmp_path], scan))
    run = found[0].run
    assert run is not None
    assert run.first_bad is found[first]
    assert run.last_good is (found[first - 1] if first else None)
    assert len(set(read_files)) < 20
    assert sum(one.not_read != [] for one in found) > 80


def test_all_good_ones_of_hundreds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scan: Scan):
    monkeypatch.setattr(checkpoint_reader, "MANY_BYTES", 0)
    written(tmp_path, set())
    run = next(open_sources([tmp_path], scan)).run
    assert run is not None
    assert run.bad == []


def test_a_run_that_heals_is_read_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scan: Scan, read_files: list[str]
):
    monkeypatch.setattr(checkpoint_reader, "MANY_BYTES", 0)
    written(tmp_path, {0, 1, 2, 50})
    run = next(open_sources([tmp_path], scan)).run
    assert run is not None
    assert [one.step for one in run.bad] == [0, 1, 2, 50]
    assert len(set(read_files)) == 100


def test_a_cut_one_among_hundreds_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scan: Scan
):
    monkeypatch.setattr(checkpoint_reader, "MANY_BYTES", 0)
    written(tmp_path, set(range(70, 100)))
    (tmp_path / "step_41.safetensors").write_bytes(GOOD[:-2])
    run = next(open_sources([tmp_path], scan)).run
    assert run is not None
    assert run.first_bad is not None
    assert run.first_bad.step == 70
    assert 41 in [one.step for one in run.bad]


def test_steps_are_ordered_as_numbers(tmp_path: Path, scan: Scan):
    for step in (9, 10, 100, 1000):
        (tmp_path / f"m_{step}.safetensors").write_bytes(GOOD)
    assert [one.step for one in open_sources([tmp_path], scan)] == [9, 10, 100, 1000]


def test_the_final_model_is_the_newest_of_its_run(tmp_path: Path, scan: Scan):
    for step in (100, 200):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "model.safetensors").write_bytes(GOOD)
    (tmp_path / "model.safetensors").write_bytes(BAD)
    run = next(open_sources([tmp_path], scan)).run
    assert run is not None
    assert [one.name for one in run.checkpoints] == [
        "checkpoint-100",
        "checkpoint-200",
        "model.safetensors",
    ]
    assert run.last_good is not None
    assert run.last_good.step == 200


def test_what_is_being_written_is_left_alone(tmp_path: Path, scan: Scan):
    for name in ("checkpoint-100", "tmp-checkpoint-200"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(GOOD if name[0] == "c" else GOOD[:-1])
    assert [one.name for one in open_sources([tmp_path], scan)] == ["checkpoint-100"]


def test_a_new_checkpoint_is_told_of_once_it_is_whole(tmp_path: Path, scan: Scan):
    watcher = CheckpointWatcher(tmp_path / "run", scan)
    assert watcher.look() == []
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / "step_100.safetensors"
    path.write_bytes(GOOD[:-3])
    assert watcher.look() == []
    assert watcher.look() == []
    path.write_bytes(GOOD)
    assert watcher.look() == []
    (told,) = watcher.look()
    assert told.good
    assert told.run is None
    assert watcher.look() == []
    (tmp_path / "run" / "step_200.safetensors").write_bytes(BAD)
    assert watcher.look() == []
    (told,) = watcher.look()
    assert told.bad
    assert told.run is not None
    assert told.run.last_good is not None
    assert told.run.last_good.step == 100


def test_one_that_never_becomes_whole_is_told_of(tmp_path: Path, scan: Scan):
    (tmp_path / "step_1.safetensors").write_bytes(GOOD[:-3])
    watcher = CheckpointWatcher(tmp_path, scan)
    told = [watcher.look() for _ in range(PATIENCE + 3)]
    assert [len(some) for some in told].count(1) == 1
    assert functools.reduce(operator.iadd, told, [])[0].damaged


def test_one_that_is_written_again_is_told_of_again(tmp_path: Path, scan: Scan):
    path = tmp_path / "last.safetensors"
    path.write_bytes(GOOD)
    watcher = CheckpointWatcher(tmp_path, scan)
    assert [len(watcher.look()) for _ in range(3)] == [0, 1, 0]
    path.write_bytes(BAD + b"")
    assert [len(watcher.look()) for _ in range(3)] == [0, 1, 0]


def test_watching_goes_on_until_it_is_stopped(tmp_path: Path, scan: Scan):
    told: list[Checkpoint] = []
    done = threading.Event()
    thread = threading.Thread(
        target=watch,
        args=(tmp_path, told.append),
        kwargs={"scan": scan, "every": 0.01, "stop": done.is_set},
    )
    thread.start()
    (tmp_path / "step_1.safetensors").write_bytes(BAD)
    for _ in range(500):
        if told:
            break
        time.sleep(0.01)
    done.set()
    thread.join(5)
    assert [one.step for one in told] == [1]
    assert not thread.is_alive()
