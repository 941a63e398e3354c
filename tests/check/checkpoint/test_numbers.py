"""What blocks of numbers are, against what torch says about them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanguard.check.checkpoint.tensor_scan import HALF_MAX, Tally, TensorNumbers
from nanguard.check.checkpoint.tensors import DTYPES, Dtype, byte_values

FLOATS = [name for name, dtype in DTYPES.items() if dtype.floats and dtype.parts == 1]
BYTES = [name for name in FLOATS if DTYPES[name].bits == 8]


def raw(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy().reshape(-1)


def measure(block: np.ndarray, dtype: Dtype) -> TensorNumbers:
    tally = Tally(dtype)
    tally.take(block)
    return tally.numbers()


def check(tensor: torch.Tensor, name: str) -> None:
    found = measure(raw(tensor), DTYPES[name])
    values = tensor.to(torch.float64)
    finite = torch.isfinite(values)
    assert found.count == tensor.numel()
    assert found.nan == int(values.isnan().sum())
    assert found.above == int((values == math.inf).sum())
    assert found.below == int((values == -math.inf).sum())
    bad = (~finite).nonzero()
    assert found.first == (int(bad[0]) if len(bad) else None)
    if finite.any():
        assert found.low == values[finite].min()
        assert found.high == values[finite].max()
    beyond = (values[finite].abs() > HALF_MAX).sum() if DTYPES[name].wide else 0
    assert found.beyond == int(beyond)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("kind", ["normal", "positive", "negative", "zero", "nan", "inf", "large"])
def test_every_type(name: str, kind: str):
    torch.manual_seed(1)
    values = torch.randn(1000, dtype=torch.float64)
    values = {"positive": values.abs(), "negative": -values.abs(), "zero": values * 0}.get(
        kind, values
    )
    if kind == "large":
        values = values * 1e5
    if name == "float8_e8m0fnu":
        values = values.abs() + 1e-3
    if kind == "nan":
        values[[17, 900]] = math.nan
    if kind == "inf":
        values[[3, 5]], values[800] = math.inf, -math.inf
    check(values.float().to(getattr(torch, name)) if values.dtype else values, name)


@pytest.mark.parametrize("name", BYTES)
def test_every_pattern_of_a_byte(name: str):
    patterns = torch.arange(256, dtype=torch.uint8)
    known = patterns.view(getattr(torch, name)).to(torch.float32).numpy()
    np.testing.assert_array_equal(byte_values(DTYPES[name]), known)
    for pattern in range(256):
        check(patterns[pattern : pattern + 1].view(getattr(torch, name)), name)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_every_pattern_of_two_bytes(name: str):
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(getattr(torch, name))
    check(patterns, name)
    values = patterns.to(torch.float64)
    alone = torch.nonzero(~torch.isfinite(values)).flatten()
    for pattern in alone[:: max(1, len(alone) // 50)]:
        check(patterns[pattern : pattern + 1], name)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(width=32), min_size=1, max_size=40))
def test_any_floats(values: list[float]):
    check(torch.tensor(values, dtype=torch.float32), "float32")
    check(torch.tensor(values, dtype=torch.float64), "float64")


def test_nothing():
    assert measure(np.empty(0, np.uint8), DTYPES["float32"]).count == 0
