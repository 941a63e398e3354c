"""A known bad sample is not an instability, and the same fault again is counted, not reported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

from nanguard import Guard
from nanguard.errors import UsageError
from nanguard.replay.starts import Starts
from nanguard.run.known_faults import Item, Quarantine, item_of, items_drawn, read_quarantine
from tests.run.bad_sample import BAD, CutRows, Rows, train

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = torch.randn(32, 4)
data[21] = 1.5
if "next" in sys.argv:
    data[25] = 1.5
seen = 0
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(9):
    loader = DataLoader(TensorDataset(data), batch_size=4)
    for step, (x,) in enumerate(loader):
        seen += int((x == 1.5).all(1).sum())
        x = (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)  # FAULT
        loss = model(x).square().mean()
        if epoch == 3 and step == 2 and "other" in sys.argv:
            loss = loss + torch.log(loss.detach() * 0)  # OTHER FAULT
        (loss / 2).backward()
        if step % 2 or "next" in sys.argv:
            optimizer.step()
            optimizer.zero_grad()
print("seen", seen, "rate", optimizer.param_groups[0]["lr"])
"""


def run(folder: Path, *words: str, options: tuple[str, ...] = ()) -> Any:
    (folder / "train.py").write_text(SCRIPT)
    guarded = [sys.executable, "-m", "nanguard", "run", "--incidents", "found", *options, "--"]
    return subprocess.run(
        [*guarded, sys.executable, "train.py", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def line_of(mark: str) -> int:
    lines = SCRIPT.splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {mark}"))


def test_one_sample_in_each_epoch_is_one_incident_and_nothing_escalates(tmp_path):
    done = run(tmp_path, "other")
    assert done.returncode == 0, done.stderr
    found = [
        json.loads(path.read_text()) for path in sorted(tmp_path.glob("found/*/incident.json"))
    ]
    sample, other = found
    # Nine epochs, nine bad steps: more than the ladder would bear.
    assert sample["times"] == 9
    assert [entry["dataset_indices"] for entry in sample["again"]] == [[21]] * 8
    assert sample["origin"]["line"] == line_of("FAULT")
    assert sample["dataset_indices"] == [21]
    assert sample["sentence"] == (
        f"train.py:{line_of('FAULT')} divides by x.std(1, keepdim=True), which is 0 for dataset "
        "item 21: 0/0 = NaN"
    )
    # Another fault is another incident.
    assert other["origin"]["line"] == line_of("OTHER FAULT")
    assert other["cause"]["code"] == "log-or-sqrt-domain"
    assert "times" not in other
    assert "cut-lr" not in done.stderr
    assert done.stderr.count("dataset item 21 (") == 8
    assert done.stdout == "seen 9 rate 0.01\n"


def test_quarantine_leaves_the_sample_out_here_and_in_the_next_run(tmp_path):
    done = run(tmp_path, options=("--quarantine",))
    assert "dataset item 21 will be left out from now on" in done.stderr
    assert done.stdout == "seen 1 rate 0.01\n"
    (line,) = (tmp_path / ".nanguard" / "quarantine.jsonl").read_text().splitlines()
    entry = json.loads(line)
    assert (entry["index"], entry["length"], entry["cause"]) == (21, 32, "degenerate-statistics")
    assert run(tmp_path, options=("--quarantine",)).stdout == "seen 0 rate 0.01\n"


@pytest.mark.parametrize("quarantine", [False, True])
def test_a_guard_knows_a_bad_sample_and_can_leave_it_out(tmp_path, monkeypatch, quarantine):
    monkeypatch.chdir(tmp_path)
    guard = train(tmp_path / "found", quarantine=quarantine, epochs=8)
    summary = guard.summary()
    assert (summary.skipped, summary.lr_cuts) == ((1, 0) if quarantine else (8, 0))
    (path,) = tmp_path.glob("found/*/incident.json")
    assert json.loads(path.read_text()).get("times", 1) == (1 if quarantine else 8)
    listed = [item.index for item in read_quarantine(tmp_path)]
    assert listed == ([BAD] if quarantine else [])


def test_a_sample_that_random_augmentation_made_bad_is_not_known_to_be_bad(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = CutRows()
    guard = train(tmp_path / "found", quarantine=True, epochs=6, data=data)
    assert guard.summary().skipped > 1
    assert not any("known to be bad" in event.reason for event in guard.summary().events)
    assert read_quarantine(tmp_path) == []
    (path,) = tmp_path.glob("found/*/incident.json")
    found = json.loads(path.read_text())
    (place,) = found["dataset_indices"]
    assert f"dataset item {place} was bad this time" in found["notes"][-1]
    assert "bad_items" not in found
    # Replays, and reading it again, left no trace: in its counter, and in its random numbers.
    expected = CutRows()
    for step in range(guard.steps):
        torch.stack([expected[index] for index in range(4 * step % 12, 4 * step % 12 + 4)])
    assert data.read == expected.read
    assert data.random.getstate() == expected.random.getstate()


@pytest.mark.parametrize("options", [{"workers": 1}, {"in_place": True}])
def test_a_sample_that_is_bad_by_itself_is_found_in_every_kind_of_loop(
    tmp_path, monkeypatch, options
):
    monkeypatch.chdir(tmp_path)
    guard = train(tmp_path / "found", quarantine=True, epochs=4, **options)
    assert guard.summary().skipped == 1
    assert [item.index for item in read_quarantine(tmp_path)] == [BAD]


def test_quarantine_without_incidents_is_refused():
    model = nn.Linear(3, 1)
    with pytest.raises(UsageError, match="quarantine needs incidents"):
        Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), quarantine=True)


@pytest.mark.parametrize(
    ("opening", "ahead", "drawn", "step"),
    [
        (False, 0, ["c"], {2}),  # the loop takes what it is given
        (False, 1, ["c"], {1}),  # Accelerate's loader has the next one already
        (True, 1, ["b", "c"], {1}),  # and two of them in its first step
        (False, 0, ["b", "c"], {1, 2}),  # gradients of two are added up
        (False, 0, [], {0, 1, 2}),  # nobody knows
    ],
)
def test_only_the_samples_of_the_step_are_known_to_be_its_own(opening, ahead, drawn, step):
    loader = SimpleNamespace(_dataset=range(3))
    batches = {name: object() for name in "abc"}
    starts = SimpleNamespace(
        batches=[(loader, batch, [place]) for place, batch in enumerate(batches.values())],
        is_opening=opening,
        ahead=ahead,
    )
    start = SimpleNamespace(drawn=[batches[name] for name in drawn], given=[])
    found = items_drawn(starts, [start])
    assert {item.index for item in found.of_step} == step
    assert sorted(found.items) == [0, 1, 2]


@pytest.mark.parametrize(
    ("steps", "ahead"),
    [
        ([1, 1, 1, 0], 0),
        ([2, 1, 1, 0], 1),  # a loader that is ahead of its loop
        ([2, 2, 1], 0),  # gradients of two are added up, and of one that is left
        ([3, 2, 2, 1], 1),
    ],
)
def test_how_far_a_loader_is_ahead_is_seen_as_it_begins(steps, ahead):
    starts = Starts()
    starts.is_on = True
    for _epoch in range(2):
        loader = object()
        for count in steps:
            for _ in range(count):
                starts.drew(loader, object(), [])
            starts.step_ended()
        assert starts.ahead == ahead


def test_a_step_is_not_excused_by_the_sample_of_another(tmp_path):
    done = run(tmp_path, "next")
    assert "step 6: the loss is nan -> skip (bad step 2 of" in done.stderr, done.stderr
    (incident,) = [json.loads(p.read_text()) for p in tmp_path.glob("found/*/incident.json")]
    assert incident["bad_items"] == [21, 25]
    again = [entry["dataset_indices"] for entry in incident["again"]]
    assert [21, 25] not in again


def test_a_sample_is_known_by_the_set_it_lies_in():
    base = TensorDataset(torch.zeros(10))
    half = Subset(Subset(base, [9, 8, 7, 6]), [3, 1])
    assert item_of(half, 1) == item_of(base, 8)
    assert item_of(base, 8) != item_of(TensorDataset(torch.zeros(11)), 8)


def test_a_set_that_cannot_say_how_long_it_is_does_not_end_the_run():
    class Endless(Rows):
        def __len__(self):
            raise RuntimeError("it goes on and on")

    assert item_of(Endless(), 3).length == 0


@pytest.mark.parametrize(
    ("chosen", "several_ranks", "left"),
    [
        ([1, 5, 7], False, [1, 7]),
        ([5], False, None),
        ([5], True, [5]),  # a batch less on one rank, and the others would wait for ever
        (5, False, None),
        (4, False, 4),
        ([(5, 5)], False, [(5, 5)]),
        ([None, None], False, [None, None]),
    ],
)
def test_what_a_loader_may_take(tmp_path, chosen, several_ranks, left):
    known = [item_of(Rows(), BAD)]
    quarantine = Quarantine(tmp_path, several_ranks=several_ranks, known=known)
    assert quarantine.without_bad(Rows(), chosen) == left
    # The same place in another set is another sample.
    other = TensorDataset(torch.zeros(12))
    assert quarantine.without_bad(other, chosen) == chosen


def test_a_list_that_somebody_has_edited_is_read_as_far_as_it_goes(tmp_path):
    (tmp_path / ".nanguard").mkdir()
    (tmp_path / ".nanguard" / "quarantine.jsonl").write_text(
        'x\n[]\n{"index": 3}\n{"dataset": "m.D", "length": 9, "index": 3}\n'
        '{"dataset": "m.D", "length": 9, "index": 1e999}\n'
    )
    assert read_quarantine(tmp_path) == [Item("m.D", 9, 3)]
    assert read_quarantine(tmp_path / "nothing") == []
