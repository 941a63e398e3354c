"""Noise schedules, adding noise, loss weights."""

from __future__ import annotations

import math

import pytest
import torch

from nanguard import ops
from nanguard.errors import UsageError

SCHEDULES = (ops.linear_schedule, ops.cosine_schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("steps", [2, 10, 1000])
def test_schedules_fall_from_one_and_never_reach_zero(schedule, steps):
    alphas = schedule(steps)
    assert alphas.shape == (steps,)
    assert alphas.dtype == torch.float32
    assert alphas[0].item() == 1.0
    assert alphas[-1].item() == pytest.approx(0.001)
    assert (alphas.diff() <= 0).all()
    assert torch.isfinite(1 / alphas.sqrt()).all()


def test_the_middle_of_each_schedule():
    assert ops.linear_schedule(1001)[500].item() == pytest.approx(0.5005)
    bare = math.cos((0.5 + 0.008) / 1.008 * math.pi / 2) ** 2
    assert ops.cosine_schedule(1001)[500].item() == pytest.approx(bare, rel=1e-3)


def test_schedules_refuse_what_reaches_zero():
    for schedule in SCHEDULES:
        with pytest.raises(UsageError, match=r"a schedule of 1000 steps from 1.0 to 0.0"):
            schedule(low=0.0)
        with pytest.raises(UsageError, match="a schedule of 1 steps"):
            schedule(1)
    with pytest.raises(UsageError, match=r"from 1\.5"):
        ops.linear_schedule(high=1.5)
    with pytest.raises(UsageError, match="offset is -1"):
        ops.cosine_schedule(offset=-1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_noise_is_added_by_each_sample_s_own_step(dtype):
    alphas = ops.linear_schedule(10)
    x, noise = torch.randn(3, 2, 4, dtype=dtype), torch.randn(3, 2, 4, dtype=dtype)
    noisy = ops.add_noise(x, noise, torch.tensor([0, 5, 9]), alphas)
    assert noisy.dtype == dtype
    assert torch.equal(noisy[0], x[0])
    expected = alphas[5].sqrt() * x[1].float() + (1 - alphas[5]).sqrt() * noise[1].float()
    torch.testing.assert_close(noisy[1].float(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("step", [-1, 10, 1000])
def test_a_step_out_of_range_is_visible(step):
    """Indexing takes -1 as the last step and says nothing."""
    x = torch.ones(2, 3)
    noisy = ops.add_noise(x, x, torch.tensor([step, 3]), ops.linear_schedule(10))
    assert noisy[0].isnan().all()
    assert torch.isfinite(noisy[1]).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", [0, 1])
def test_bad_samples_and_bad_noise_come_through(bad, which):
    pair = [torch.ones(2, 3), torch.ones(2, 3)]
    pair[which][:, 1] = bad
    noisy = ops.add_noise(*pair, torch.tensor([0, 9]), ops.linear_schedule(10))
    assert not torch.isfinite(noisy[:, 1]).any()
    assert torch.isfinite(noisy[:, [0, 2]]).all()


def test_an_alpha_out_of_range_is_visible_and_a_learned_one_has_a_finite_gradient():
    x = torch.ones(2, 3)
    assert ops.add_noise(x, x, torch.tensor([0, 1]), torch.tensor([-0.1, 1.1])).isnan().all()
    alphas = torch.tensor([1.0, 0.0], requires_grad=True)
    ops.add_noise(x, x, torch.tensor([0, 1]), alphas).sum().backward()
    assert torch.isfinite(alphas.grad).all()


def test_add_noise_refuses_shapes_that_would_broadcast():
    x = torch.ones(2, 3)
    for noise, step in ((torch.ones(3), torch.tensor([0, 1])), (x, torch.tensor(0)), (x, x[:, 0])):
        with pytest.raises(UsageError, match=r"x is \(2, 3\), noise"):
            ops.add_noise(x, noise, step, ops.linear_schedule(10))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_weights_are_the_formula_up_to_the_maximum(dtype):
    t = torch.linspace(0, 1, 1001, dtype=dtype)
    early, late = ops.early_time_weight(t), ops.late_time_weight(t)
    assert early.dtype == late.dtype == dtype
    assert early.max().item() == pytest.approx(100, rel=0.01)
    assert late.max().item() == pytest.approx(100, rel=0.01)
    wide = t[5:-5].double()
    torch.testing.assert_close(early[5:-5].double(), (wide + 1) / wide.sqrt(), rtol=0.01, atol=0.0)
    torch.testing.assert_close(
        late[5:-5].double(), ((2 - wide) / (1 - wide + 1e-6)).sqrt(), rtol=0.01, atol=0.0
    )


def test_other_maxima():
    t = torch.tensor([0.0, 1.0])
    assert ops.early_time_weight(t, maximum=5.0)[0].item() == pytest.approx(5.0)
    assert ops.late_time_weight(t, maximum=5.0)[1].item() == pytest.approx(5.0)
    # An eps that bounds the weight by itself is left alone.
    assert ops.late_time_weight(t, eps=0.01)[1].item() == pytest.approx(10.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_time_is_visible(bad):
    for weight in (ops.early_time_weight, ops.late_time_weight, ops.bounded_weight):
        assert not torch.isfinite(weight(torch.tensor([bad])))


def test_weights_refuse_what_cannot_be():
    t = torch.tensor([0.5])
    for call in (
        lambda: ops.early_time_weight(t, maximum=2.0),
        lambda: ops.late_time_weight(t, maximum=1.0),
        lambda: ops.early_time_weight(t, maximum=math.nan),
    ):
        with pytest.raises(UsageError, match="the maximum is"):
            call()
    with pytest.raises(UsageError, match="eps is -1"):
        ops.late_time_weight(t, eps=-1)
    with pytest.raises(UsageError, match=r"the input is torch.int64"):
        ops.early_time_weight(torch.tensor([3]))
