"""What is finite and what is not, for every type of number."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from nanguard import numerics
from nanguard.numerics import Gradients
from tests.training import INF, NAN

TYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
BAD = [NAN, INF, -INF]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("place", [0, 777, -1])
def test_one_bad_value_is_found(dtype: torch.dtype, bad: float, place: int):
    values = torch.randn(1001).to(dtype)
    assert numerics.all_finite([values])
    values[place] = bad
    assert not numerics.all_finite([torch.ones(3), values])
    assert bool(numerics.non_finite([torch.ones(3), values], torch.device("cpu")))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_sums_that_overflow_are_no_alarm(dtype: torch.dtype):
    assert numerics.all_finite([torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)])


def test_what_cannot_be_non_finite_is_left_out():
    tensors = [torch.zeros(3, dtype=torch.long), torch.zeros(0), torch.zeros((), dtype=torch.bool)]
    assert numerics.all_finite(tensors)
    assert not bool(numerics.non_finite(tensors, torch.device("cpu")))
    assert numerics.all_finite([])


def test_float8_and_scalars():
    assert numerics.all_finite([torch.ones(8).to(torch.float8_e4m3fn), torch.tensor(1.0)])
    assert not numerics.all_finite([torch.full((8,), NAN).to(torch.float8_e4m3fn)])
    assert not numerics.all_finite([torch.tensor(NAN)])


@given(st.floats(width=32), st.floats(allow_nan=False, allow_infinity=False, width=32))
def test_within_says_what_python_says(value: float, limit: float):
    good = bool(numerics.within(torch.tensor(value), limit))
    assert good == (value <= limit and value not in (INF, -INF))


@pytest.mark.parametrize("max_norm", [0.1, 100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_clipping_is_torchs_own_bit_for_bit(dtype: torch.dtype, max_norm: float):
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(n, dtype=dtype)) for n in (3, 500, 7)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    before = [p.grad.clone() for p in parameters]
    gradients = Gradients(parameters)
    norm = gradients.norm()
    gradients.clip(norm, max_norm)
    got = [p.grad for p in parameters]
    for parameter, grad in zip(parameters, before, strict=True):
        parameter.grad = grad
    assert torch.equal(norm, nn.utils.clip_grad_norm_(parameters, max_norm))
    assert all(torch.equal(a, p.grad) for a, p in zip(got, parameters, strict=True))


def test_gradients_of_different_types_have_one_norm():
    parameters = [nn.Parameter(torch.ones(4, dtype=d)) for d in (torch.float32, torch.bfloat16)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    assert float(Gradients(parameters).norm()) == pytest.approx(8**0.5, rel=1e-3)


def test_clipping_sparse_gradients_with_repeated_rows():
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1, 1, 3])).sum().backward()
    dense = table.weight.grad.to_dense()
    gradients = Gradients([table.weight])
    norm = gradients.norm()
    assert torch.equal(norm, dense.norm())
    gradients.clip(norm, 1.0)
    torch.testing.assert_close(table.weight.grad.to_dense(), dense / dense.norm())


def test_no_gradient_at_all():
    assert float(Gradients([nn.Parameter(torch.zeros(2))]).norm()) == 0.0
