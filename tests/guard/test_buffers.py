"""Buffers of every kind: what a bad step did to them is undone, however they came about."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanguard import Guard, Settings
from tests.training import (
    INF,
    NAN,
    QUIET,
    Net,
    Run,
    batches,
    differences,
    poisoned,
    take_step,
    without,
)

LAGS = pytest.mark.parametrize("lag", [0, 2])


class WithCache(nn.Module):
    """A model that makes, replaces or registers a buffer in its forward pass."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(8, 4)
        if kind != "registered":
            self.register_buffer("cache", None if kind == "lazy" else torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        seen = out.detach()
        if self.kind == "lazy":
            self.cache = seen.mean(0)
        elif self.kind == "grows":
            self.cache = torch.cat([self.cache, seen.mean(0)])
        elif self.kind == "replaced":
            self.cache = 0.9 * self.cache + 0.1 * seen.mean(0)
        elif not hasattr(self, "cache"):
            self.register_buffer("cache", seen.mean(0))
        else:
            self.cache.lerp_(seen.mean(0), 0.1)
        return out


class Growing(Net):
    """A model that layers can be put in front of."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.before(x))


def make(model: nn.Module, **settings: Any) -> tuple[Guard, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    return Guard(model, optimizer, settings=Settings(**{**QUIET, **settings})), optimizer


def train(guard: Guard | None, model: nn.Module, optimizer: Any, data: Any) -> None:
    for x, y in guard.watch(data) if guard else data:
        loss = F.cross_entropy(model(x), y)
        take_step(guard, optimizer, loss)


@LAGS
@pytest.mark.parametrize("bad", [(0,), (5,), (5, 6), (9,)])
@pytest.mark.parametrize("kind", ["lazy", "grows", "replaced", "registered"])
def test_a_buffer_that_the_bad_step_made(kind: str, bad: tuple[int, ...], lag: int):
    data = batches(10)
    torch.manual_seed(0)
    clean = WithCache(kind)
    train(
        None, clean, torch.optim.AdamW(clean.parameters(), lr=1e-2, fused=True), without(data, bad)
    )
    torch.manual_seed(0)
    model = WithCache(kind)
    guard, _ = make(model, lag=lag)
    train(guard, model, None, poisoned(data, bad))
    guard.close()
    assert differences(dict(model.named_buffers()), dict(clean.named_buffers())) == []
    assert differences(dict(model.named_parameters()), dict(clean.named_parameters())) == []


@pytest.mark.parametrize("kind", ["lazy", "grows", "registered"])
def test_a_rollback_takes_buffers_back_to_their_shape(kind: str):
    model = WithCache(kind)
    guard, _ = make(model, snapshot_every=3, on_bad="rollback")
    shapes = []
    for x, y in guard.watch(poisoned(batches(9), (7,))):
        guard.backward(F.cross_entropy(model(x), y))
        guard.step()
        shapes.append(model.cache.shape if getattr(model, "cache", None) is not None else None)
    assert guard.summary().rollbacks == 1
    assert shapes[7] == shapes[5]
    assert bool(torch.isfinite(model.cache).all())


def test_a_rollback_removes_what_was_registered_since():
    model = Net()
    guard, _ = make(model, snapshot_every=3, on_bad="rollback")
    for index, (x, y) in enumerate(guard.watch(poisoned(batches(8), (5,)))):
        if index == 4:
            model.register_buffer("late", torch.full((2,), NAN))
        guard.backward(F.cross_entropy(model(x), y))
        guard.step()
        assert hasattr(model, "late") == (index == 4)


def test_a_buffer_with_a_cache_survives_the_disk(tmp_path: Any):
    states = []
    for attempt in range(2):
        torch.manual_seed(attempt)
        model = WithCache("registered")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        settings = Settings(**{**QUIET, "snapshot_every": 4, "disk_every": 4})
        guard = Guard(model, optimizer, run_dir=tmp_path, settings=settings)
        assert guard.resume() == (attempt == 1)
        if attempt == 0:
            train(guard, model, optimizer, batches(4))
        guard.close()
        states.append({k: v.clone() for k, v in model.state_dict().items()})
    assert differences(states[1], states[0]) == []


@LAGS
def test_a_module_that_is_added_while_training(lag: int):
    model = Growing()
    guard, optimizer = make(model, lag=lag, snapshot_every=2)
    for index, (x, y) in enumerate(guard.watch(poisoned(batches(14), (9,)))):
        if index == 5:
            model.before.append(nn.BatchNorm1d(8))
            optimizer.add_param_group({"params": list(model.before.parameters())})
        guard.backward(F.cross_entropy(model(x), y))
        guard.step()
    guard.close()
    assert guard.summary().skipped == 1
    assert all(bool(torch.isfinite(t).all()) for t in model.state_dict().values())
    assert guard.summary().snapshots > 3


@LAGS
def test_a_module_or_a_mask_that_is_added_while_a_bad_step_is_in_flight(lag: int):
    model = Net()
    guard, optimizer = make(model, lag=lag)
    for index, (x, y) in enumerate(guard.watch(poisoned(batches(14), (6,)))):
        if index == 7:
            model.extra = nn.BatchNorm1d(8)
            model.register_buffer("ones", torch.ones(3))
            optimizer.add_param_group({"params": list(model.extra.parameters())})
        out = model(model.extra(x) * model.ones.mean()) if index >= 7 else model(x)
        guard.backward(F.cross_entropy(out, y))
        guard.step()
    guard.close()
    assert guard.summary().skipped == 1
    assert all(bool(torch.isfinite(t).all()) for t in model.state_dict().values())
    assert {"extra.running_mean", "ones"} <= model.state_dict().keys()


def test_a_buffer_that_is_removed_late_is_no_trouble():
    model = Net()
    model.register_buffer("once", torch.zeros(3))
    guard, _ = make(model)
    for index, (x, y) in enumerate(guard.watch(batches(75))):
        if index == 70:
            del model.once
        guard.backward(F.cross_entropy(model(x), y))
        guard.step()
    assert guard.summary().applied == 75


@LAGS
def test_an_expanded_buffer_and_a_mask_are_left_alone(lag: int):
    model = Net()
    model.register_buffer("wide", torch.ones(1).expand(5))
    model.register_buffer("mask", torch.full((3, 3), -INF).triu(1))
    guard, _ = make(model, lag=lag, snapshot_every=2, scan_every=3)
    train(guard, model, None, poisoned(batches(10), (4,)))
    guard.close()
    assert guard.summary().skipped == 1
    assert guard.summary().snapshots == 4
    assert [event.finding.name for event in guard.summary().events] == ["non-finite-loss"]


@LAGS
def test_a_mask_that_is_made_later_is_no_poison(lag: int):
    model = Net()
    guard, _ = make(model, lag=lag, snapshot_every=2, scan_every=3)
    for index, (x, y) in enumerate(guard.watch(batches(10))):
        if index == 4:
            model.register_buffer("mask", torch.full((3, 3), -INF).triu(1))
        guard.backward(F.cross_entropy(model(x), y))
        guard.step()
    guard.close()
    assert guard.summary().events == []


@LAGS
def test_a_buffer_is_written_without_a_trace_in_autograd(lag: int):
    """One forward pass and two steps: a buffer in the graph must not count as modified."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.actor, self.critic = nn.Linear(8, 4), nn.Linear(8, 1)
            self.register_buffer("scale", torch.ones(8))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = x * self.scale
            return self.actor(x), self.critic(x)

    model = Scaled()
    a, c = (torch.optim.Adam(m.parameters(), fused=True) for m in (model.actor, model.critic))
    guard = Guard(model, [a, c], settings=Settings(**{**QUIET, "lag": lag}))
    for x, y in guard.watch(batches(8)):
        x.requires_grad_(True)
        logits, value = model(x)
        guard.backward(F.cross_entropy(logits, y), retain_graph=True)
        guard.step(a)
        guard.backward(value.pow(2).mean())
        guard.step(c)
    guard.close()
    assert guard.summary().applied == 16


@LAGS
@pytest.mark.parametrize("where", ["scan", "snapshot", "end"])
def test_a_buffer_that_is_poisoned_while_the_loss_is_fine(where: str, lag: int):
    class Normalised(nn.Module):
        """Clamps what it normalises, so that the loss never shows it."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4)
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            self.mean.lerp_(x.mean(0), 0.1)
            return self.linear((x - self.mean).nan_to_num(0, 0, 0).clamp(-3, 3))

    model = Normalised()
    settings = {
        "scan": {"scan_every": 4, "snapshot_every": 100},
        "snapshot": {"scan_every": 1000, "snapshot_every": 4},
        "end": {"scan_every": 1000, "snapshot_every": 1000},
    }[where]
    guard, _ = make(model, lag=lag, **settings)
    train(guard, model, None, poisoned(batches(20), (9,), INF))
    guard.close()
    summary = guard.summary()
    assert "non-finite-parameter" in [event.finding.name for event in summary.events]
    assert summary.events[-1].finding.where == "buffer mean"
    if where != "end":
        assert summary.rollbacks == 1
        assert bool(torch.isfinite(model.mean).all())


@LAGS
@pytest.mark.parametrize("how", ["continue", "break"])
def test_a_bad_batch_that_the_loop_passes_over_by_itself(how: str, lag: int):
    """Loops that people bring along: ``if not isfinite(loss): continue``."""
    data, bad = batches(10), 6
    clean = Run().bare(data[:bad] if how == "break" else without(data, [bad])).everything()
    run = Run()
    guard = run.make_guard(lag=lag)
    for batch in guard.watch(poisoned(data, [bad])):
        loss = run.loss(batch)
        if not torch.isfinite(loss):
            if how == "break":
                break
            continue
        guard.backward(loss)
        guard.step(max_norm=1.0)
    guard.close()
    assert differences(run.everything(), clean) == []
    assert guard.summary().skipped == 0


@LAGS
def test_what_a_good_batch_did_before_it_was_passed_over_stays(lag: int):
    data = list(enumerate(batches(12)))

    def go(guarded: bool) -> Any:
        run = Run()
        guard = run.make_guard(lag=lag) if guarded else None
        for index, batch in guard.watch(data) if guard else without(data, [5]):
            torch.randn(3)
            run.model(batch[0])
            if index in (3, 4):
                continue
            loss = run.loss(batch)
            if guard:
                guard.backward(loss * (NAN if index == 5 else 1.0))
                guard.step(max_norm=1.0)
                continue
            loss.backward()
            nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.scheduler.step()
            run.ema.update_parameters(run.model)
        return run.everything()

    assert differences(go(guarded=True), go(guarded=False)) == []


@LAGS
def test_a_module_that_is_added_late_is_protected_at_once(lag: int):
    model = Growing()
    guard, optimizer = make(model, lag=lag, spikes="off")
    for index, (x, y) in enumerate(guard.watch(poisoned(batches(80), (73,)))):
        if index == 70:
            model.before.append(nn.BatchNorm1d(8))
            optimizer.add_param_group({"params": list(model.before.parameters())})
        guard.backward(F.cross_entropy(model(x), y))
        guard.step()
    guard.close()
    assert guard.summary().skipped == 1
    assert bool(torch.isfinite(model.before[0].running_mean).all())


@LAGS
def test_a_bad_batch_that_is_passed_over_among_others_voids_their_step(lag: int):
    data, bad = batches(16), 6
    clean = Run(accumulate=4).bare(without(data, range(4, 8))).everything()
    run = Run(accumulate=4)
    guard = run.make_guard(lag=lag)
    for index, batch in guard.enumerate(poisoned(data, [bad])):
        loss = run.loss(batch)
        if torch.isfinite(loss):
            guard.backward(loss)
        if (index + 1) % 4 == 0:
            guard.step(max_norm=1.0)
    guard.close()
    assert guard.summary().skipped == 1
    assert differences(run.everything(), clean) == []


def test_a_batch_that_is_passed_over_while_a_bad_step_is_in_flight_counts_once():
    ends = []
    for lag in (0, 2):
        run = Run()
        guard = run.make_guard(lag=lag)
        for index, batch in guard.enumerate(poisoned(batches(14), [6])):
            loss = run.loss(batch)
            if index in (7, 8):
                continue
            guard.backward(loss)
            guard.step(max_norm=1.0)
        guard.close()
        ends.append(run.everything())
    assert differences(*ends) == []


@LAGS
def test_a_buffer_that_is_written_and_then_replaced_in_one_step(lag: int):
    class Queue(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4)
            self.register_buffer("queue", torch.zeros(2, 4))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.linear(x)
            self.queue[0] = out.detach().mean(0)
            self.queue = torch.cat([self.queue, self.queue[:1]])
            return out

    model = Queue()
    guard, _ = make(model, lag=lag, scan_every=2)
    train(guard, model, None, poisoned(batches(12), (6,)))
    guard.close()
    assert guard.summary().skipped == 1
    assert model.queue.shape == (2 + 11, 4)
    assert bool(torch.isfinite(model.queue).all())
