"""Warm-up and cosine."""

from __future__ import annotations

import math

import pytest
import torch

from nanguard import ops
from nanguard.errors import UsageError


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=1e-3)


def rates(schedule, opt: torch.optim.Optimizer, steps: int) -> list[float]:
    seen = []
    for _ in range(steps):
        seen.append(opt.param_groups[0]["lr"])
        opt.step()
        schedule.step()
    return seen


def test_it_rises_falls_and_stays():
    opt = optimizer()
    seen = rates(ops.warmup_cosine(opt, warmup_steps=5, total_steps=25), opt, 40)
    assert seen[0] == pytest.approx(1e-4)
    assert seen[5] == pytest.approx(1e-3)
    assert seen[:6] == sorted(seen[:6])
    assert seen[5:26] == sorted(seen[5:26], reverse=True)
    assert seen[15] == pytest.approx(5e-4)
    assert seen[25:] == [0.0] * 15


def test_it_is_torch_s_own_warm_up_and_cosine():
    ours, theirs = optimizer(), optimizer()
    warm = torch.optim.lr_scheduler.LinearLR(theirs, start_factor=0.1, total_iters=5)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(theirs, T_max=20, eta_min=1e-5)
    both = torch.optim.lr_scheduler.SequentialLR(theirs, [warm, cosine], milestones=[5])
    mine = ops.warmup_cosine(ours, warmup_steps=5, total_steps=25, end_factor=0.01)
    assert rates(mine, ours, 25) == pytest.approx(rates(both, theirs, 25), rel=1e-9)


def test_no_warm_up():
    assert ops.WarmupCosine(0, 10)(0) == 1.0
    assert ops.WarmupCosine(0, 10, end_factor=0.1)(99) == pytest.approx(0.1)
    assert all(math.isfinite(ops.WarmupCosine(0, 1)(step)) for step in range(5))


def test_it_goes_on_from_its_state():
    opt = optimizer()
    schedule = ops.warmup_cosine(opt, warmup_steps=3, total_steps=10)
    rates(schedule, opt, 4)
    state = (schedule.state_dict(), opt.state_dict())
    rest = rates(schedule, opt, 6)
    other = optimizer()
    resumed = ops.warmup_cosine(other, warmup_steps=3, total_steps=10)
    resumed.load_state_dict(state[0])
    other.load_state_dict(state[1])
    assert rates(resumed, other, 6) == rest


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warmup_steps": 10, "total_steps": 10}, "10 steps of warm-up in 10 steps"),
        ({"warmup_steps": -1, "total_steps": 10}, "-1 steps of warm-up"),
        ({"warmup_steps": 1, "total_steps": 9, "start_factor": 0.0}, "start_factor is 0.0"),
        ({"warmup_steps": 1, "total_steps": 9, "end_factor": 2.0}, "end_factor is 2.0"),
        ({"warmup_steps": 1, "total_steps": 9, "start_factor": math.nan}, "start_factor is nan"),
    ],
)
def test_schedules_that_cannot_be(options, message):
    with pytest.raises(UsageError, match=message):
        ops.warmup_cosine(optimizer(), **options)
