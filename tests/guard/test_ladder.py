"""The ladder in real runs: what happens to weights, learning rate and data."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nanguard import Guard, NonFiniteError, Settings
from nanguard.testing import inject
from tests.training import NAN, Net, Run, batches, differences, poisoned, without


def test_skips_then_cuts_the_learning_rate_and_climbs_back():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = Settings(max_skips=1, recent=50, lr_climb_after=4, max_lr_cuts=1, snapshot_every=0)
    guard = Guard(model, optimizer, settings=settings)
    moved = []
    data = [(x, y, i in (3, 5)) for i, (x, y) in enumerate(batches(14))]
    for x, y, bad in guard.watch(data):
        before = model.last.bias.detach().clone()
        loss = F.cross_entropy(model(x), y) * (NAN if bad else 1.0)
        guard.backward(loss)
        grad = None if model.last.bias.grad is None else model.last.bias.grad.clone()
        guard.step()
        moved.append(((before - model.last.bias.detach()) / grad).mean().item())
        assert optimizer.param_groups[0]["lr"] == 0.1, "the cut must not be visible to a scheduler"
    rates = [round(rate, 4) for rate in moved if rate == rate]
    assert rates == [0.1, 0.1, 0.1, 0.0, 0.1, 0.0, 0.05, 0.05, 0.05, 0.05, 0.1, 0.1, 0.1, 0.1] or (
        rates == [0.1, 0.1, 0.1, 0.1, 0.05, 0.05, 0.05, 0.05, 0.1, 0.1, 0.1, 0.1]
    )
    assert [e.action.value for e in guard.summary().events] == ["skip", "cut-lr", "step"]
    assert guard.summary().lr_cuts == 1


@pytest.mark.parametrize("lag", [0, 2])
def test_rolls_back_to_the_last_good_snapshot_and_skips_the_data_in_between(lag: int):
    data = poisoned(batches(20), (13,))
    run = Run()
    guard = run.make_guard(on_bad="rollback", snapshot_every=5, lag=lag)
    seen: list[int] = []
    states: dict[int, Any] = {}
    for index, batch in guard.watch(enumerate(data)):
        if guard.updates == 10 and 10 not in states:
            states[10] = {
                "model": {k: v.clone() for k, v in run.model.state_dict().items()},
                "ema": {k: v.clone() for k, v in run.ema.state_dict().items()},
                "lr": run.scheduler.get_last_lr(),
            }
        if guard.summary().rollbacks and "after" not in states:
            states["after"] = {
                "model": {k: v.clone() for k, v in run.model.state_dict().items()},
                "ema": {k: v.clone() for k, v in run.ema.state_dict().items()},
                "lr": run.scheduler.get_last_lr(),
            }
            assert guard.updates == 10
        seen.append(index)
        guard.backward(run.loss(batch))
        guard.step(max_norm=1.0)
    assert differences(states["after"], states[10]) == []
    assert guard.summary().lost_updates == 3
    assert seen[-6:] == [14, 15, 16, 17, 18, 19], "batches 10 to 13 are not given out again"
    assert guard.updates == 16


def test_rolling_back_is_bounded_and_stopping_leaves_good_weights():
    data = batches(12)
    run = Run()
    guard = run.make_guard(on_bad="rollback", max_rollbacks=1, snapshot_every=3)
    with (
        inject(guard, "nan", into="loss", step=(7, 9)),
        pytest.raises(NonFiniteError) as caught,
    ):
        for batch in guard.watch(data):
            guard.backward(run.loss(batch))
            guard.step(max_norm=1.0)
    assert caught.value.finding.step == 9
    assert caught.value.finding.name == "non-finite-loss"
    assert str(caught.value) == (
        "the loss is nan\n"
        "  where: step 9\n"
        "  do:    on_bad is 'rollback'; all 1 rollbacks are spent. The weights are those of the "
        "last good step or snapshot and can be saved. Look at the batch and the values named "
        "above; guard.summary() lists what happened before."
    )
    assert all(bool(torch.isfinite(p).all()) for p in run.model.parameters())


@pytest.mark.parametrize("lag", [0, 2])
def test_stopping_at_once_keeps_the_weights_of_the_step_before(lag: int):
    data, bad = batches(10), 6
    clean = Run().bare(data[:bad]).everything()
    run = Run()
    guard = run.make_guard(on_bad="stop", lag=lag)
    with pytest.raises(NonFiniteError, match="the loss is nan"):
        for batch in guard.watch(poisoned(data, [bad])):
            guard.backward(run.loss(batch))
            guard.step(max_norm=1.0)
    assert differences(run.everything(), clean) == []


class Writes(torch.optim.SGD):
    """Writes a NaN into a parameter from finite gradients, as fp16 Adam does with eps 1e-8."""

    def __init__(self, parameters: Any, at: int, which: int = 0) -> None:
        super().__init__(parameters, lr=0.1)
        self.at, self.which, self.calls = at, which, 0

    def step(self, closure: Any = None) -> None:
        super().step()
        self.calls += 1
        if self.calls - 1 == self.at:
            with torch.no_grad():
                self.param_groups[0]["params"][self.which].view(-1)[0] = NAN


@pytest.mark.parametrize("scan_every", [1, 1000])
def test_parameters_that_turn_bad_after_a_step_are_rolled_back(scan_every: int):
    model = Net()
    optimizer = Writes(model.parameters(), at=7)
    guard = Guard(model, optimizer, settings=Settings(snapshot_every=3, scan_every=scan_every))
    for x, y in guard.watch(batches(14)):
        guard.backward(F.cross_entropy(model(x), y))
        guard.step()
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    (event,) = guard.summary().events
    assert event.finding.name == "non-finite-parameter"
    assert event.finding.message == "not finite after step 7: parameter first.weight"
    assert event.action.value == "rollback"


def test_a_parameter_that_the_loss_does_not_see_is_found_by_the_scan():
    class Rare(Net):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Parameter(torch.zeros(3))

    model = Rare()
    parameters = [*model.parameters()]
    index = next(i for i, p in enumerate(parameters) if p is model.unused)
    guard = Guard(
        model,
        Writes(parameters, at=5, which=index),
        settings=Settings(scan_every=4, snapshot_every=100),
    )
    for x, y in guard.watch(batches(12)):
        guard.backward(F.cross_entropy(model(x), y))
        guard.step()
    (event,) = guard.summary().events
    assert event.finding.name == "non-finite-parameter"
    assert event.finding.where == "parameter unused"
    assert event.finding.step == 7, "the scan after update 8 sees what step 5 wrote"
    assert guard.summary().lost_updates == 7
    assert bool(torch.isfinite(model.unused).all())


@pytest.mark.parametrize("lag", [0, 2])
def test_a_snapshot_that_is_not_finite_is_refused_and_looked_into(lag: int):
    class Rare(Net):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Parameter(torch.zeros(3))

    model = Rare()
    parameters = [*model.parameters()]
    index = next(i for i, p in enumerate(parameters) if p is model.unused)
    guard = Guard(
        model,
        Writes(parameters, at=5, which=index),
        settings=Settings(scan_every=1000, snapshot_every=2, lag=lag),
    )
    for x, y in guard.watch(batches(16)):
        guard.backward(F.cross_entropy(model(x), y))
        guard.step()
    first, *_, last = guard.summary().events
    assert first.finding.name == "snapshot-not-finite"
    assert last.finding.name == "non-finite-parameter"
    assert last.action.value == "rollback"
    assert guard.summary().lost_updates <= 2 + lag
    assert bool(torch.isfinite(model.unused).all())


def test_poisoned_parameters_without_a_snapshot_stop_the_run():
    model = Net()
    guard = Guard(model, Writes(model.parameters(), at=2), settings=Settings(snapshot_every=0))
    with pytest.raises(NonFiniteError, match="no good snapshot"):
        for x, y in guard.watch(batches(8)):
            guard.backward(F.cross_entropy(model(x), y))
            guard.step()


def test_fp16_adam_with_an_eps_that_rounds_to_zero():
    """The classic: half-precision parameters, finite gradients, NaN weights after one step."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4).half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-8)
    guard = Guard(model, optimizer, settings=Settings(max_rollbacks=1, scan_every=1))
    x = torch.zeros(2, 4, dtype=torch.float16)  # the gradient of the weight is exactly 0
    with pytest.raises(NonFiniteError) as caught:
        for _ in guard.watch(range(4)):
            guard.backward(model(x).sum())
            guard.step()
    assert caught.value.finding.name == "non-finite-parameter"
    assert "parameter weight" in caught.value.finding.message
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


def test_every_event_is_logged_once(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, logger="nanguard"):
        run = Run().guarded(poisoned(batches(12), (3, 7)), lag=2)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert lines[0].startswith("nanguard: step 3: the loss is nan -> batch skipped")
    text = str(run.guard.summary())
    assert "12 steps, 10 applied, 2 skipped" in text
    assert "step 7: the loss is nan" in text


def test_the_callback_sees_every_event_in_the_training_thread():
    seen = []
    model = Net()
    guard = Guard(
        model, torch.optim.AdamW(model.parameters()), on_event=lambda e: seen.append(str(e))
    )
    for x, y in guard.watch(poisoned(batches(6), (2,))):
        guard.backward(F.cross_entropy(model(x), y))
        guard.step()
    assert seen == [
        "step 2: the loss is nan -> batch skipped (bad step 1 of at most 5 in 100)",
    ]


def test_drift_and_falling_scale_are_warned_about_and_change_nothing():
    model = nn.Linear(1, 1)
    guard = Guard(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        settings=Settings(spike_window=32, spike_warmup=16),
    )
    falling = [4 - i / 100 for i in range(300)]
    rising = [1 + i / 60 for i in range(240)]
    for level in guard.watch(falling + rising):
        guard.backward(model(torch.zeros(1, 1)).sum() * 0 + level)
        guard.step()
    summary = guard.summary()
    assert [e.finding.name for e in summary.events] == ["diverging-loss"]
    assert summary.applied == 540
    assert summary.warnings == 1


def test_clean_batches_after_bad_ones_are_the_bare_run():
    data, bad = batches(30), (10, 11, 12, 13, 14)
    clean = Run().bare(without(data, bad)).everything()
    run = Run().guarded(poisoned(data, bad), max_skips=5, lag=2)
    assert differences(run.everything(), clean) == []
