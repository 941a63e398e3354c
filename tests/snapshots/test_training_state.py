"""Snapshots in memory: good only when every number in them is finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from nanguard import Guard, Settings
from nanguard.snapshots import manager
from nanguard.snapshots.training_state import (
    MemorySnapshots,
    TrainingState,
    map_tensors,
    tensors_in,
)
from tests.training import INF, NAN, Net, batches

GOOD = torch.zeros((), dtype=torch.bool)


def snapshots(slots: int = 2) -> MemorySnapshots:
    def floats(tree: dict[str, Any]) -> dict[str, torch.Tensor]:
        return {path: t for path, t in tensors_in(tree) if t.is_floating_point()}

    return MemorySnapshots(slots=slots, copied_at_once=("b",), floats=floats, agree=lambda bad: bad)


def tree(value: float) -> dict[str, Any]:
    return {
        "a": {"w": torch.full((3,), value), "n": [torch.tensor(4), "text"]},
        "b": {"m": torch.full((2,), value)},
    }


def test_a_snapshot_is_a_copy_and_becomes_the_last_good_one():
    kept = snapshots()
    live = tree(1.0)
    snapshot = kept.take(live, 5, 4, GOOD)
    live["a"]["w"].fill_(9)
    live["b"]["m"].fill_(9)
    assert kept.last_good is None
    assert kept.settle(snapshot, good=True)
    assert kept.last_good.tree["a"]["w"].tolist() == [1, 1, 1]
    assert kept.last_good.tree["b"]["m"].tolist() == [1, 1]
    assert kept.last_good.tree["a"]["n"][1] == "text"


@pytest.mark.parametrize("bad", [NAN, float("inf"), float("-inf")])
@pytest.mark.parametrize("place", ["a", "b"])
def test_a_state_that_is_not_finite_never_becomes_good(place: str, bad: float):
    kept = snapshots()
    assert kept.settle(kept.take(tree(1.0), 1, 0, GOOD), good=True)
    live = tree(2.0)
    next(iter(live[place].values()))[1] = bad
    assert not kept.settle(kept.take(live, 2, 1, GOOD), good=True)
    assert kept.last_good.update == 1
    assert kept.settle(kept.take(tree(3.0), 3, 2, GOOD), good=True)
    assert kept.last_good.tree["a"]["w"].tolist() == [3, 3, 3]


def test_what_began_infinite_or_was_made_later_may_be_infinite():
    class Fixed:
        def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
            self.tensors = tensors

        def state_dict(self) -> dict[str, torch.Tensor]:
            return dict(self.tensors)

        def load_state_dict(self, state: Any) -> None:
            raise AssertionError

    buffers = Fixed({"mask": torch.tensor([0.0, -INF]), "mean": torch.zeros(2)})
    optimizer = Fixed({})
    state = TrainingState({"buffers": buffers, "optimizer-0": optimizer})
    buffers.tensors["later"] = torch.tensor([INF])
    optimizer.tensors["exp_avg"] = torch.tensor([1.0])
    assert list(state.floats(state.tree())) == ["buffers/mean", "optimizer-0/exp_avg"]
    assert list(state.finite_buffers()) == ["mean"]


def test_a_snapshot_whose_step_was_bad_is_dropped_and_its_memory_used_again():
    kept = snapshots(slots=2)
    assert kept.settle(kept.take(tree(1.0), 1, 0, GOOD), good=True)
    for update in range(2, 8):
        assert not kept.settle(kept.take(tree(2.0), update, update, GOOD), good=False)
    assert kept.last_good.update == 1


def test_memory_that_is_being_written_is_not_used_again():
    kept = snapshots(slots=2)
    kept.settle(kept.take(tree(1.0), 1, 0, GOOD), good=True)
    held = kept.last_good.hold()
    kept.settle(kept.take(tree(2.0), 2, 1, GOOD), good=True)
    assert not kept.has_room
    assert held.tree["a"]["w"].tolist() == [1, 1, 1]
    held.release()
    assert kept.settle(kept.take(tree(3.0), 3, 2, GOOD), good=True)


def test_memory_is_used_again_rather_than_taken_anew():
    kept = snapshots()
    addresses = []
    for update in range(1, 7):
        snapshot = kept.take(tree(float(update)), update, update, GOOD)
        kept.settle(snapshot, good=True)
        addresses.append(snapshot.tree["a"]["w"].data_ptr())
    assert len(set(addresses)) == 2


def test_trees_keep_their_shape():
    paths = [path for path, _ in tensors_in(tree(1.0))]
    assert paths == ["a/w", "a/n/0", "b/m"]
    doubled = map_tensors(tree(1.0), lambda t: t * 2)
    assert doubled["a"]["w"].tolist() == [2, 2, 2]
    assert doubled["a"]["n"][1] == "text"


def train(guard: Guard, model: nn.Module, count: int) -> None:
    for x, _ in guard.watch(batches(count)):
        guard.backward(model(x).pow(2).mean())
        guard.step()


@pytest.mark.parametrize("where", ["buffer", "ema", "optimizer"])
def test_buffers_ema_and_optimizer_state_are_scanned_too(where: str):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    ema = AveragedModel(model)
    guard = Guard(model, optimizer, ema=ema, settings=Settings(snapshot_every=1, max_rollbacks=0))
    train(guard, model, 2)
    assert guard.summary().snapshots == 2
    with torch.no_grad():
        if where == "buffer":
            model.norm.running_var[0] = float("inf")
            model.eval()  # so that the loss does not see it
        elif where == "ema":
            next(ema.parameters()).view(-1)[0] = NAN
        else:
            optimizer.state[model.last.bias]["exp_avg_sq"][0] = float("inf")
    x, _ = batches(1)[0]
    if where == "buffer":
        guard.backward(model.last(torch.ones(2, 24)).mean() + 0 * model.first(x).sum())
    else:
        guard.backward(model(x).pow(2).mean())
    guard.step()
    assert guard.summary().snapshots == 2
    assert "snapshot-not-finite" in {e.finding.name for e in guard.summary().events}


def test_a_mask_of_minus_infinities_in_a_buffer_is_no_reason_to_refuse():
    class Masked(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))

    model = Masked()
    guard = Guard(model, torch.optim.AdamW(model.parameters()), settings=Settings(snapshot_every=1))
    train(guard, model, 3)
    assert guard.summary().snapshots == 3
    assert guard.summary().events == []


def test_too_little_memory_is_said_once_and_training_goes_on(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(manager, "_free_memory", lambda: 1000)
    model = Net()
    guard = Guard(model, torch.optim.AdamW(model.parameters()), settings=Settings(snapshot_every=2))
    train(guard, model, 8)
    assert guard.summary().applied == 8
    (event,) = guard.summary().events
    assert event.finding.name == "snapshot-not-written"
    assert "GiB of host memory" in event.finding.message
