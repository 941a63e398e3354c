"""A guard cannot be bypassed in silence, and says what became of each step."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from nanguard import Guard
from nanguard.errors import UsageError


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Linear(2, 1)


@pytest.fixture
def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(model, value=1.0):
    return model(torch.full((4, 2), value)).square().mean()


def test_stepping_past_the_guard_says_what_to_write(model, optimizer):
    guard = Guard(model, optimizer)
    before = model.weight.detach().clone()
    guard.backward(loss_of(model, float("nan")))
    with pytest.raises(UsageError, match=r"SGD\.step\(\) was called after guard\.backward") as told:
        optimizer.step()
    assert "Call guard.step() instead" in str(told.value)
    assert torch.equal(model.weight, before)
    guard.close()


def test_a_watched_loop_that_knows_nothing_of_the_guard_says_what_to_write(model, optimizer):
    guard = Guard(model, optimizer)
    before = model.weight.detach().clone()
    with pytest.raises(UsageError, match="knows nothing of its gradients") as told:
        for value in guard.watch([1.0, float("nan"), 1.0]):
            loss_of(model, value).backward()
            optimizer.step()
    assert "Call guard.backward(loss) instead of loss.backward()" in str(told.value)
    assert torch.equal(model.weight, before)
    guard.close()


def test_an_optimizer_is_free_again_behind_the_loop(model, optimizer):
    guard = Guard(model, optimizer)
    for value in guard.watch([1.0, 1.0]):
        guard.backward(loss_of(model, value))
        guard.step()
    loss_of(model).backward()
    optimizer.step()
    guard.close()


def test_a_loop_that_ended_without_a_step_says_so(model, optimizer):
    with Guard(model, optimizer) as guard:
        for _ in range(2):
            for value in guard.watch([1.0, 1.0, 1.0]):
                guard.backward(loss_of(model, value))
        said = [event.finding.message for event in guard.summary().events]
    assert said == ["3 backward passes and no guard.step(): nothing is trained"]


def test_steps_that_are_none_of_its_business_are_made(model, optimizer):
    guard = Guard(model, optimizer)
    before = model.weight.detach().clone()
    loss_of(model).backward()
    optimizer.step()  # before the first batch of the guard, such as a warm-up of the loop's own
    assert not torch.equal(model.weight, before)
    guard.close()
    loss_of(model).backward()
    optimizer.step()


def test_a_guard_that_nobody_closed_and_nobody_has_is_gone(model, optimizer):
    guard = Guard(model, optimizer)
    guard.backward(loss_of(model))
    del guard
    gc.collect()
    optimizer.step()


def test_step_returns_whether_it_was_made(model, optimizer):
    made = []
    with Guard(model, optimizer) as guard:
        for value in (1.0, float("nan"), 1.0):
            guard.backward(loss_of(model, value))
            made.append((guard.step(), guard.last_step_skipped))
    assert made == [(True, False), (False, True), (True, False)]


def test_closure_steps_return_it_too(model):
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    with Guard(model, optimizer) as guard:

        def closure():
            loss = loss_of(model)
            optimizer.zero_grad()
            guard.backward(loss)
            return loss

        assert guard.step(closure=closure) is True


def test_forgotten_step_is_said_once(model, optimizer):
    with Guard(model, optimizer) as guard:
        for _ in range(250):
            guard.backward(loss_of(model))
        said = [event.finding for event in guard.summary().events]
    assert [(finding.code, finding.name) for finding in said] == [("RUN018", "no-guard-step")]
    assert "100 backward passes and no guard.step()" in said[0].message
