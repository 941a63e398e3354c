"""Functions with an edge: what is particular about each."""

from __future__ import annotations

import math

import pytest
import torch
from torch.func import vmap

from nanguard import ops
from nanguard.errors import UsageError

HALVES = (torch.float16, torch.bfloat16)


def test_log_and_sqrt_floor_at_eps_without_a_gradient():
    x = torch.tensor([-3.0, 0.0, 1e-20, 4.0], requires_grad=True)
    log = ops.safe_log(x, eps=1e-6)
    assert log.tolist() == pytest.approx([math.log(1e-6)] * 3 + [math.log(4)])
    (slope,) = torch.autograd.grad(log.sum(), x)
    assert slope.tolist() == [0.0, 0.0, 0.0, 0.25]
    root = ops.safe_sqrt(x)
    assert root.tolist() == pytest.approx([1e-6] * 3 + [2.0])
    (slope,) = torch.autograd.grad(root.sum(), x)
    assert slope.tolist() == [0.0, 0.0, 0.0, 0.25]


@pytest.mark.parametrize("op", [ops.safe_log, ops.safe_sqrt, ops.safe_norm, ops.safe_std])
def test_an_eps_that_is_zero_in_the_type_is_refused(op):
    with pytest.raises(UsageError) as caught:
        op(torch.ones(3, dtype=torch.float16), eps=1e-8)
    assert "eps is 1e-08, which is no positive normal number in torch.float16" in str(caught.value)
    assert "use at least 6.1e-05" in str(caught.value)
    assert f"nanguard.ops.{op.__name__}" in str(caught.value)


@pytest.mark.parametrize("eps", [0.0, -1.0, math.nan, math.inf])
def test_an_eps_that_is_none_is_refused(eps):
    for call in (ops.safe_log, ops.safe_acos):
        with pytest.raises(UsageError, match=f"eps is {eps}"):
            call(torch.ones(3), eps=eps)


@pytest.mark.parametrize(
    "op",
    [
        ops.safe_log, ops.safe_sqrt, ops.safe_norm, ops.safe_acos, ops.safe_std, ops.bounded_exp,
        ops.gumbel_noise, lambda x: ops.safe_pow(x, 2), lambda x: ops.safe_div(1.0, x),
        lambda x: ops.hard_cap(x, 1.0), lambda x: ops.soft_cap(x, 1.0),
    ],
)  # fmt: skip
def test_whole_numbers_are_refused(op):
    with pytest.raises(UsageError, match=r"the input is torch.int64"):
        op(torch.ones(3, dtype=torch.int64))


def test_division_keeps_the_sign_of_a_small_denominator():
    b = torch.tensor([1e-9, -1e-9, 0.0, -0.0, 2.0, -2.0])
    assert ops.safe_div(1.0, b).tolist() == pytest.approx([1e6, -1e6, 1e6, 1e6, 0.5, -0.5])


def test_an_infinite_denominator_is_not_a_quiet_zero():
    assert not torch.isfinite(ops.safe_div(1.0, torch.tensor([math.inf, -math.inf]))).any()


def test_the_gradient_of_a_division_fits_the_type_just_above_its_floor():
    b = torch.tensor([0.0079], dtype=torch.float16, requires_grad=True)
    ops.safe_div(1.0, b).sum().backward()
    assert torch.isfinite(b.grad).all()
    assert b.grad.item() < -10_000


def test_norm_of_zeros_second_derivative():
    """What a gradient penalty does at the zero vector; torch's own norm is NaN there."""

    def penalty(norm):
        x = torch.zeros(2, 3, requires_grad=True)
        weight = torch.ones(3, 3, requires_grad=True)
        (slope,) = torch.autograd.grad((x @ weight).square().sum(), x, create_graph=True)
        (norm(slope) - 1).square().sum().backward()
        return weight.grad

    assert not torch.isfinite(penalty(lambda s: s.pow(2).sum(-1).sqrt())).all()
    assert torch.isfinite(penalty(lambda s: ops.safe_norm(s, -1))).all()


def test_a_norm_below_its_floor_has_no_gradient():
    x = torch.tensor([[1e-8, 1e-8], [3.0, 4.0]], requires_grad=True)
    norm = ops.safe_norm(x, -1)
    norm.sum().backward()
    assert norm.tolist() == pytest.approx([1e-6, 5.0])
    assert x.grad.tolist() == [[0.0, 0.0], pytest.approx([0.6, 0.8])]


@pytest.mark.parametrize("dtype", HALVES)
def test_norms_of_halves_come_in_float32_and_do_not_overflow(dtype):
    x = torch.full((2, 1024), 3000.0, dtype=dtype, requires_grad=True)
    norm = ops.safe_norm(x, -1)
    assert norm.dtype == torch.float32
    assert norm.tolist() == pytest.approx([96000.0] * 2, rel=0.01)
    norm.sum().backward()
    assert x.grad.float().mean().item() == pytest.approx(1 / 32, rel=0.01)


def test_norm_and_std_take_dimensions_as_torch_does():
    x = torch.randn(2, 3, 4)
    for dim in (None, 0, -1, (0, 2), (1,)):
        for keepdim in (False, True):
            norm = torch.linalg.vector_norm(x, dim=dim, keepdim=keepdim)
            torch.testing.assert_close(ops.safe_norm(x, dim, keepdim=keepdim), norm)
            std = torch.std(x, dim=dim, keepdim=keepdim)
            torch.testing.assert_close(ops.safe_std(x, dim, keepdim=keepdim), std)


def test_std_of_one_value_is_the_floor_and_of_none_is_refused():
    x = torch.tensor([[5.0], [7.0]], requires_grad=True)
    std = ops.safe_std(x, -1)
    std.sum().backward()
    assert std.tolist() == pytest.approx([1e-6, 1e-6])
    assert x.grad.tolist() == [[0.0], [0.0]]
    assert ops.safe_std(torch.tensor([[1.0, 3.0]]), 1, correction=5).item() == pytest.approx(2**0.5)
    with pytest.raises(UsageError, match=r"no values in a tensor of shape \(3, 0\)"):
        ops.safe_std(torch.ones(3, 0), -1)


def test_std_in_float16_does_not_overflow_in_the_variance():
    x = torch.tensor([-30000.0, 30000.0], dtype=torch.float16)
    assert ops.safe_std(x).item() == pytest.approx(42432, rel=0.01)


def test_acos_is_defined_where_cosines_end_up():
    x = torch.tensor([1.0000001, -1.0000001], requires_grad=True)
    angle = ops.safe_acos(x)
    assert angle.tolist() == pytest.approx([0.0, math.pi], abs=1e-3)
    angle.sum().backward()
    assert torch.isfinite(x.grad).all()
    with pytest.raises(UsageError, match=r"use at least 0\.000977"):
        ops.safe_acos(torch.ones(2, dtype=torch.float16), eps=1e-6)


def test_exp_is_bounded_at_the_limit_and_refuses_one_that_overflows():
    assert (
        ops.bounded_exp(torch.tensor([5.0, 50.0]), limit=3.0).tolist()
        == [pytest.approx(math.exp(3))] * 2
    )
    assert ops.bounded_exp(torch.tensor([50.0]), limit=0.0).item() == 1.0
    with pytest.raises(UsageError, match=r"its exponential is no number in torch\.float16"):
        ops.bounded_exp(torch.ones(2, dtype=torch.float16), limit=20.0)


def test_a_power_that_is_too_large_stays_visible():
    assert ops.safe_pow(torch.tensor([1e30]), 3.0).item() == math.inf


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64])
def test_gumbel_noise_is_finite_and_is_gumbel(dtype):
    like = torch.empty(400, 500, dtype=dtype)
    noise = ops.gumbel_noise(like, generator=torch.Generator().manual_seed(0))
    assert noise.dtype == dtype
    assert noise.shape == like.shape
    assert torch.isfinite(noise).all()
    wide = noise.double()
    assert wide.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert wide.std().item() == pytest.approx(math.pi / math.sqrt(6), abs=0.01)


def test_the_usual_gumbel_noise_is_not_finite_in_halves():
    torch.manual_seed(0)
    usual = -torch.log(-torch.log(torch.rand(100_000, dtype=torch.bfloat16)))
    assert not torch.isfinite(usual).all()


def test_gumbel_noise_under_vmap_and_from_logits_that_require_grad():
    logits = torch.zeros(3, 5, requires_grad=True)
    noise = vmap(ops.gumbel_noise, randomness="different")(logits)
    assert noise.unique().numel() == 15
    assert not ops.gumbel_noise(logits).requires_grad


def test_caps_refuse_a_limit_that_bounds_nothing():
    for cap in (ops.hard_cap, ops.soft_cap):
        for limit in (0.0, -1.0, math.inf, math.nan):
            with pytest.raises(UsageError, match=f"the limit is {limit}"):
                cap(torch.ones(2), limit)
