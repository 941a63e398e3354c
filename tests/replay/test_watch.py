"""What a watcher says about the state of an optimizer, and about steps that belong together."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from nanguard.guard.optimizers import Round
from nanguard.replay.watch import Watch


class Quiet(Watch):
    """Watches, and does nothing."""

    def before_backward(self, losses):
        pass

    def after_backward(self):
        pass

    def boundary(self):
        pass

    def judged_step(self, optimizer, call, closure):
        return call()

    def judged_scaler_step(self, scaler, optimizer, call):
        return call()


@pytest.mark.parametrize(("value", "kind"), [(math.nan, "nan"), (math.inf, "inf"), (1e30, None)])
def test_a_moment_that_is_not_finite_is_bad_and_a_single_number_may_be_infinite(value, kind):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    watch = Quiet()
    optimizer.state[model.weight]["best"] = torch.tensor(math.inf)
    assert watch.bad_state(optimizer) is None
    optimizer.state[model.weight]["exp_avg"][1, 2] = value
    symptom = watch.bad_state(optimizer)
    assert (None if symptom is None else (symptom.where, symptom.kind)) == (
        None if kind is None else ("optimizer state", kind)
    )


def test_optimizers_of_one_backward_pass_are_partners_and_are_held_back_together():
    one, other, third = (torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(3))
    steps = Round()
    for backwards in (1, 2):
        assert not steps.enter(one, backwards)
        assert not steps.enter(other, backwards)
    assert not steps.enter(one, 3)
    assert steps.others(one) == [other]
    steps.hold_back()
    assert steps.enter(other, 3)
    assert not steps.enter(third, 4)  # another backward pass is another step
    assert steps.others(third) == []
    assert not steps.enter(one, 5)
    assert not steps.enter(one, 6)  # alone, as it is from now on
    assert steps.others(one) == []


def test_a_script_without_backward_has_a_round_whenever_an_optimizer_steps_again():
    one, other = (torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(2))
    steps = Round()
    assert not steps.enter(one, 0)
    steps.hold_back()
    assert steps.enter(other, 0)
    assert not steps.enter(one, 0)
    assert not steps.enter(other, 0)
    assert len(steps._members) == 2
