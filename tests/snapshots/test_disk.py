"""Snapshots on disk: whole or not there, and the last good one always there."""

from __future__ import annotations

import copy
import enum
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanguard import Guard, Settings
from nanguard.errors import SnapshotError
from nanguard.snapshots import disk
from nanguard.snapshots.disk import DiskSnapshots, finished, load_tree, remove_leftovers, verify
from tests.training import Net, Run, batches, differences

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def tree(value: float = 1.0) -> dict[str, Any]:
    return {"parameters": {"w": torch.full((1000,), value)}, "guard": {"update": int(value)}}


def snapshots(folder: Path, keep: int = 3) -> DiskSnapshots:
    failures: list[str] = []
    made = DiskSnapshots(folder, keep=keep, on_failure=failures.append)
    made.failures = failures  # type: ignore[attr-defined]
    return made


def newest(made: DiskSnapshots) -> Any:
    """Returns manifest and state of the newest snapshot that can be used."""
    used: list[Any] = []
    manifest = made.load_last_good(used.append)
    return manifest, used[-1]


def test_what_was_written_comes_back(tmp_path: Path):
    made = snapshots(tmp_path)
    path = made.write(tree(3), update=3, step=4)
    assert sorted(p.name for p in path.iterdir()) == ["manifest.json", "state.pt"]
    manifest, loaded = newest(made)
    assert (manifest["update"], manifest["step"]) == (3, 4)
    assert torch.equal(loaded["parameters"]["w"], torch.full((1000,), 3.0))


def test_rotation_keeps_the_newest_also_after_a_rollback(tmp_path: Path):
    made = snapshots(tmp_path, keep=2)
    for update in (10, 20, 30, 15, 25):
        made.write(tree(update), update=update, step=update)
    assert [p.name for p in finished(tmp_path)] == [
        "snapshot-000004-update-15",
        "snapshot-000005-update-25",
    ]
    assert newest(made)[0]["update"] == 25
    assert list(tmp_path.glob(".*")) == []


def damage_truncate(path: Path) -> None:
    os.truncate(path / "state.pt", 500)


def damage_flip(path: Path) -> None:
    data = bytearray((path / "state.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (path / "state.pt").write_bytes(bytes(data))


def damage_manifest(path: Path) -> None:
    (path / "manifest.json").write_text("{")


def damage_missing(path: Path) -> None:
    (path / "state.pt").unlink()


def damage_escape(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["../../escape"] = manifest["files"]["state.pt"]
    (path / "manifest.json").write_text(json.dumps(manifest))


def damage_schema(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["schema"] = "nanguard.snapshot/99"
    (path / "manifest.json").write_text(json.dumps(manifest))


def damage_no_update(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["update"]
    (path / "manifest.json").write_text(json.dumps(manifest))


def damage_nested(path: Path) -> None:
    (path / "manifest.json").write_text("[" * 100_000)


def damage_pipe(path: Path) -> None:
    (path / "manifest.json").unlink()
    os.mkfifo(path / "manifest.json")


def damage_loop(path: Path) -> None:
    (path / "state.pt").unlink()
    (path / "state.pt").symlink_to(path / "state.pt")


def damage_pipe_member(path: Path) -> None:
    (path / "state.pt").unlink()
    os.mkfifo(path / "state.pt")


DAMAGES = [value for name, value in list(globals().items()) if name.startswith("damage_")]


def test_if_no_snapshot_can_be_used_nothing_begins_anew_in_silence(tmp_path: Path):
    made = snapshots(tmp_path)
    assert made.load_last_good(lambda _: None) is None
    damage_flip(made.write(tree(1), update=1, step=1))
    with pytest.raises(SnapshotError, match="does not match its checksum"):
        made.load_last_good(lambda _: None)


def test_folders_that_only_look_like_snapshots_are_no_business_of_ours(tmp_path: Path):
    made = snapshots(tmp_path)
    made.write(tree(1), update=1, step=1)
    for name in ("snapshot-²-update-3", "snapshot-x", "snapshot-000009", "snapshot-1-update-2-old"):
        (tmp_path / name).mkdir()
    (tmp_path / ".snapshot-1-update-1.99999999999999999999999.tmp").mkdir()
    remove_leftovers(tmp_path)
    made.write(tree(2), update=2, step=2)
    assert [path.name for path in finished(tmp_path)] == [
        "snapshot-000001-update-1",
        "snapshot-000002-update-2",
    ]


def spoil_learned(state: Any) -> None:
    del state["guard"]["learned"]


def spoil_optimizer(state: Any) -> None:
    del state["optimizer-0"]["state"]


def spoil_kind(state: Any) -> None:
    state["parameters"] = [1, 2]


def spoil_values(state: Any) -> None:
    state["parameters"]["first.weight"][0, 0] = float("nan")


def spoil_buffers(state: Any) -> None:
    del state["buffers"]["norm.running_mean"]


def spoil_shape(state: Any) -> None:
    state["optimizer-0"]["state"][0]["exp_avg"] = torch.zeros(1)


def spoil_rate(state: Any) -> None:
    state["optimizer-0"]["param_groups"][0]["lr"] = float("nan")


def spoil_factor(state: Any) -> None:
    state["guard"]["learned"]["policy"]["lr_factor"] = float("nan")


def spoil_place(state: Any) -> None:
    state["guard"]["moment"]["position"] = "a"


def spoil_width(state: Any) -> None:
    weights = state["parameters"]["first.weight"]
    state["parameters"]["first.weight"] = torch.full(weights.shape, 1e300, dtype=torch.float64)


def spoil_everything(state: Any) -> None:
    state.clear()


@pytest.mark.parametrize(
    "spoil", [value for name, value in list(globals().items()) if name.startswith("spoil_")]
)
def test_a_state_that_does_not_fit_is_passed_over_and_changes_nothing(spoil: Any, tmp_path: Path):
    """Whole by its checksums, but made by someone else."""
    run = Run()
    guard = run.make_guard(run_dir=tmp_path, snapshot_every=4, disk_every=4)
    for batch in guard.watch(batches(4)):
        guard.backward(run.loss(batch))
        guard.step()
    guard.close()
    made = snapshots(tmp_path / "snapshots", keep=5)
    state = newest(made)[1]
    spoil(state)
    made.write(state, update=9, step=9)
    fresh = Run()
    guard = fresh.make_guard(run_dir=tmp_path, snapshot_every=4, disk_every=4)
    assert guard.resume()
    assert guard.updates == 4
    for path in finished(tmp_path / "snapshots")[:-1]:
        damage_missing(path)
    fresh = Run()
    before = copy.deepcopy(fresh.everything())
    guard = fresh.make_guard(run_dir=tmp_path, snapshot_every=4, disk_every=4)
    with pytest.raises(SnapshotError):
        guard.resume()
    assert differences(fresh.everything(), before) == []


def test_a_state_that_cannot_be_written_is_said_and_ends_nothing(tmp_path: Path):
    class Odd:
        optimizer = None

        def step(self) -> None:
            """Schedules nothing."""

        def state_dict(self) -> Any:
            return {"function": lambda: 1}

        def load_state_dict(self, state: Any) -> None:
            raise AssertionError

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = Settings(snapshot_every=2, disk_every=2)
    guard = Guard(model, optimizer, scheduler=Odd(), run_dir=tmp_path, settings=settings)
    for x, y in guard.watch(batches(6)):
        guard.backward(torch.nn.functional.cross_entropy(model(x), y))
        guard.step()
    guard.close()
    said = [event.finding.message for event in guard.summary().events]
    # On a slow disk there is also a snapshot that came while another was being written.
    assert any("scheduler-0/function is of type function" in message for message in said)
    assert guard.summary().applied == 6


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_snapshot_is_passed_over_with_a_warning(
    damage: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    made = snapshots(tmp_path)
    made.write(tree(1), update=1, step=1)
    newest = made.write(tree(2), update=2, step=2)
    damage(newest)
    with pytest.raises(SnapshotError):
        verify(newest)
    with caplog.at_level(logging.WARNING, logger="nanguard"):
        manifest = made.load_last_good(lambda state: None)
    assert manifest["update"] == 1
    assert "snapshot passed over" in caplog.text


def test_nothing_in_a_snapshot_is_ever_run(tmp_path: Path):
    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path / 'pwned'}",)

    torch.save({"parameters": Evil()}, tmp_path / "state.pt")
    with pytest.raises(SnapshotError, match="cannot be loaded"):
        load_tree(tmp_path / "state.pt")
    assert not (tmp_path / "pwned").exists()


def test_leftovers_of_the_dead_are_removed_and_those_of_the_living_are_not(tmp_path: Path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / f".snapshot-000001-update-5.{dead.pid}.tmp").mkdir(parents=True)
    alive = tmp_path / f".snapshot-000002-update-6.{os.getpid()}.tmp"
    alive.mkdir()
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == [alive]


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: Any):
    made = snapshots(tmp_path)
    made.write(tree(1), update=1, step=1)

    def broken(_path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "_flush", broken)
    with pytest.raises(OSError, match="No space left"):
        made.write(tree(2), update=2, step=2)
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["snapshot-000001-update-1"]
    assert newest(made)[0]["update"] == 1


def test_a_full_disk_is_called_what_it_is(tmp_path: Path, monkeypatch: Any):
    """Torch itself speaks of an unexpected position in an archive."""
    with Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr(disk, "open_private", lambda _path: full)
        with pytest.raises(OSError, match="No space left on device"):
            snapshots(tmp_path).write(tree(2), update=2, step=2)
    assert list(tmp_path.iterdir()) == []


def test_snapshots_are_the_users_alone(tmp_path: Path):
    before = os.umask(0)
    try:
        path = snapshots(tmp_path / "run" / "snapshots").write(tree(1), update=1, step=1)
    finally:
        os.umask(before)
    modes = {p.name: oct(p.stat().st_mode & 0o777) for p in (path.parent, path, *path.iterdir())}
    assert modes == {
        "snapshots": "0o700",
        path.name: "0o700",
        "state.pt": "0o600",
        "manifest.json": "0o600",
    }


FULL_DISK = """
import json, resource, signal, sys
import torch
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from tests.training import Run, batches
run = Run()
guard = run.make_guard(run_dir=sys.argv[1], snapshot_every=5, disk_every=5)
for index, batch in enumerate(guard.watch(batches(40))):
    if index == 20:  # from here on no file may grow beyond 2 kB
        guard._recovery.disk.close()
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))
    guard.backward(run.loss(batch))
    guard.step(max_norm=1.0)
guard.close()
summary = guard.summary()
print(json.dumps({"counts": summary.counts(), "events": [str(e) for e in summary.events]}))
"""


def test_a_full_disk_costs_a_warning_and_nothing_else(tmp_path: Path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["counts"]["applied"] == 40
    assert any("could not write the snapshot" in event for event in told["events"]), told
    assert any("could not write the run record" in event for event in told["events"]), told
    found = finished(tmp_path / "snapshots")
    assert found, "what was good before the disk was full is still there"
    assert [verify(path)["update"] for path in found][-1] <= 25
    assert list((tmp_path / "snapshots").glob(".*")) == []


# A process that has torch loaded and forks, so that a killed run costs no new start.
ZYGOTE = """
import os, signal, sys, time
import torch
torch.set_num_threads(1)
from tests.training import Run, batches
data = batches(400) * 100
Run().guarded(data[:2])  # what is loaded late is loaded now
print("ready", flush=True)
for line in sys.stdin:
    folder = line.strip()
    child = os.fork()
    if child == 0:
        run = Run()
        guard = run.make_guard(run_dir=folder, snapshot_every=1, disk_every=1, keep=2)
        guard.resume()
        for batch in guard.watch(data):
            guard.backward(run.loss(batch))
            guard.step(max_norm=1.0)
        os._exit(0)
    print(child, flush=True)
    os.waitpid(child, 0)
    print("dead", flush=True)
"""


def _wait_for_change(folder: Path) -> None:
    before, until = _names_in(folder), time.monotonic() + 60.0
    while _names_in(folder) == before and time.monotonic() < until:
        time.sleep(0.005)


def _names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*")} if folder.exists() else set()


def test_kill_9_at_any_moment_never_loses_the_last_good_snapshot(tmp_path: Path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    rng = random.Random(11)
    zygote = subprocess.Popen(
        [sys.executable, "-c", ZYGOTE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    assert zygote.stdout.readline().strip() == "ready"
    folder, last, unfinished = tmp_path / "run", 0, 0
    made = snapshots(folder / "snapshots", keep=2)
    try:
        for round_ in range(40):
            zygote.stdin.write(f"{folder}\n")
            zygote.stdin.flush()
            child = int(zygote.stdout.readline())
            # On a busy machine it takes a while until the run has come to where it writes.
            _wait_for_change(folder / "snapshots")
            time.sleep(rng.random() * 0.12)
            os.kill(child, signal.SIGKILL)
            assert zygote.stdout.readline().strip() == "dead"
            unfinished += len(list((folder / "snapshots").glob(".*")))
            states: list[Any] = []
            manifest = made.load_last_good(states.append)
            if last:
                assert manifest is not None, f"round {round_} lost everything"
            if manifest is not None:
                assert manifest["update"] >= last, "an older snapshot than before"
                last = manifest["update"]
                assert states[-1]["guard"]["moment"]["update"] == last
    finally:
        zygote.stdin.close()
        zygote.stdout.close()
        zygote.wait(timeout=30)
    assert last > 20, "the runs did get somewhere"
    assert unfinished > 0, "some runs were killed while they were writing"


def test_a_run_resumed_after_kill_9_ends_like_the_one_that_was_never_killed(tmp_path: Path):
    """The snapshot of any moment leads to the same end, because it is of one moment."""
    data = batches(30)
    whole = Run().guarded(data, run_dir=tmp_path / "whole", snapshot_every=4, disk_every=4)
    first = Run()
    guard = first.make_guard(run_dir=tmp_path / "run", snapshot_every=4, disk_every=4)
    for index, batch in enumerate(guard.watch(data)):
        guard.backward(first.loss(batch))
        guard.step(max_norm=1.0)
        if index == 17:
            break  # as if killed: nothing is closed
    guard._recovery.close()
    second = Run()
    guard = second.make_guard(run_dir=tmp_path / "run", snapshot_every=4, disk_every=4)
    assert guard.resume()
    for batch in guard.watch(data):
        guard.backward(second.loss(batch))
        guard.step(max_norm=1.0)
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, second.model.state_dict()[name])


class Level(enum.IntEnum):
    HIGH = 3


@pytest.mark.parametrize(
    ("state", "back"),
    [
        ({"a": (1, [2.5, None])}, {"a": (1, [2.5, None])}),
        (Counter({np.int64(5): 2}), Counter({5: 2})),
        ({(1, 2): "pair", "$type": "mine"}, {(1, 2): "pair", "$type": "mine"}),
        ({"level": Level.HIGH}, {"level": 3}),
        (OrderedDict(b=1, a=2), OrderedDict(b=1, a=2)),
        ({"rate": np.float32(0.1)}, {"rate": np.float32(0.1)}),
    ],
)
def test_states_come_back_as_they_were(state: Any, back: Any, tmp_path: Path):
    disk.save_tree({"state": state}, tmp_path / "state.pt")
    loaded = load_tree(tmp_path / "state.pt")["state"]
    assert loaded == back
    assert type(loaded) is type(back)
