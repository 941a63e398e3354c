"""Softmax and attention: rows, masks, scales."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from nanguard import ops
from nanguard.errors import UsageError

sdpa = functional.scaled_dot_product_attention


def qkv(*, length: int = 5, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 3, length, 8, dtype=dtype, requires_grad=True) for _ in range(3)]


def gradients(out: torch.Tensor, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(out.square().sum(), inputs)


def test_an_empty_row_is_zero_and_the_others_sum_to_one():
    mask = torch.tensor([[True, False, True], [False, False, False]])
    scores = torch.randn(2, 3, requires_grad=True)
    weights = ops.masked_softmax(scores, mask)
    assert weights[1].tolist() == [0.0] * 3
    assert weights[0].sum().item() == pytest.approx(1.0)
    assert weights[0, 1].item() == 0.0
    (slope,) = torch.autograd.grad(weights[:, 0].sum(), scores)
    assert slope[1].tolist() == [0.0] * 3


@pytest.mark.parametrize(
    "options", [{}, {"max_score": 5.0}, {"max_score": 5.0, "cap_kind": "soft"}]
)
def test_a_masked_nan_has_no_effect_and_no_gradient(options):
    mask = torch.tensor([[True, False, True], [False, False, False]])
    scores = torch.tensor([[1.0, math.nan, 2.0], [math.nan, math.inf, 0.0]], requires_grad=True)
    weights = ops.masked_softmax(scores, mask, **options)
    assert torch.isfinite(weights).all()
    (slope,) = torch.autograd.grad(weights.square().sum(), scores)
    assert torch.isfinite(slope).all()
    assert slope[~mask].tolist() == [0.0] * 4
    assert slope[mask].abs().min() > 0


def test_only_the_mask_excuses_a_row_of_minus_inf():
    scores = torch.full((2, 3), -math.inf)
    mask = torch.ones(2, 3, dtype=torch.bool)
    mask[1] = False
    weights = ops.masked_softmax(scores, mask)
    assert weights[0].isnan().all()
    assert weights[1].tolist() == [0.0] * 3


def test_softmax_along_another_dimension_and_without_a_mask():
    scores = torch.randn(4, 3)
    mask = torch.rand(4, 1) > 0.3
    ours = ops.masked_softmax(scores, mask, 0)
    theirs = scores.masked_fill(~mask, -math.inf).softmax(0)
    torch.testing.assert_close(ours, theirs)
    assert torch.equal(ops.masked_softmax(scores), scores.softmax(-1))


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
@pytest.mark.parametrize("shape", [(), (4,), (3, 4), (1, 4), (3, 1), (2, 3, 4)])
def test_masks_with_fewer_dimensions_than_the_scores(dim, shape):
    torch.manual_seed(0)
    scores = torch.randn(2, 3, 4)
    mask = torch.rand(shape) > 0.6
    whole = mask.expand_as(scores)
    ours = ops.masked_softmax(scores, mask, dim)
    plain = torch.softmax(torch.where(whole, scores, -torch.inf), dim)
    assert torch.equal(ours, torch.where(whole.any(dim, keepdim=True), plain, 0.0))


def test_a_mask_of_numbers_is_refused():
    with pytest.raises(UsageError, match=r"the mask is torch.float32"):
        ops.masked_softmax(torch.ones(3), torch.ones(3))
    with pytest.raises(UsageError, match=r"the mask is torch.int64"):
        ops.attention(*qkv(), torch.ones(5, 5, dtype=torch.int64))


@pytest.mark.parametrize("causal", [False, True])
def test_without_a_mask_it_is_torch_s_own(causal):
    inputs = qkv()
    ours, theirs = ops.attention(*inputs, is_causal=causal), sdpa(*inputs, is_causal=causal)
    assert torch.equal(ours, theirs)
    for a, b in zip(gradients(ours, inputs), gradients(theirs, inputs), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("shape", [(5, 5), (2, 1, 1, 5), (2, 1, 5, 5), (2, 3, 5, 5)])
@pytest.mark.parametrize("additive", [False, True])
def test_with_a_mask_that_keeps_something_in_each_row(shape, additive):
    inputs = qkv(dtype=torch.float64)
    mask = torch.rand(shape) > 0.4
    mask[..., 1] = True
    if additive:
        mask = torch.where(mask, torch.randn(shape, dtype=torch.float64), -math.inf)
    ours, theirs = ops.attention(*inputs, mask), sdpa(*inputs, mask)
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(gradients(ours, inputs), gradients(theirs, inputs), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("fill", [None, -math.inf, torch.finfo(torch.float32).min])
@pytest.mark.parametrize(
    "options", [{}, {"max_score": 10.0}, {"max_score": 10.0, "cap_kind": "soft"}]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_an_empty_row_is_zero_and_gives_no_gradient(fill, options, dtype):
    inputs = qkv(dtype=dtype)
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    mask[0, 0, 2] = False
    given = mask if fill is None else torch.zeros(mask.shape).masked_fill(~mask, fill)
    out = ops.attention(*inputs, given, **options)
    assert out.dtype == dtype
    assert not out[0, :, 2].any()
    assert out[1].any(-1).all()
    slopes = gradients(out, inputs)
    assert all(torch.isfinite(slope).all() for slope in slopes)
    assert not slopes[0][0, :, 2].any()
    # The row opened for the kernel must not reach keys and values either.
    rest = [inputs[0].detach().clone(), *inputs[1:]]
    rest[0][0, :, 2] = 7.0
    again = gradients(ops.attention(*rest, given, **options), inputs[1:])
    for a, b in zip(slopes[1:], again, strict=True):
        torch.testing.assert_close(a, b)


def test_causal_beside_left_padding_has_empty_rows():
    """Left padding leaves the first queries nothing to look at."""
    inputs = qkv()
    keys = torch.tensor([False, False, True, True, True])
    for mask in (keys, ops.AttentionMask.of(keys.view(1, 5))):
        out = ops.attention(*inputs, mask, is_causal=True)
        assert not out[:, :, :2].any()
        plain = sdpa(*inputs, keys & torch.ones(5, 5, dtype=torch.bool).tril())
        torch.testing.assert_close(out[:, :, 2:], plain[:, :, 2:])
    added = torch.zeros(5).masked_fill(~keys, -math.inf)
    torch.testing.assert_close(ops.attention(*inputs, added, is_causal=True), out)
    torch.testing.assert_close(ops.attention(*inputs, keys, is_causal=True, max_score=99.0), out)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("additive", [False, True])
def test_a_mask_looked_at_once_gives_the_same(causal, additive):
    inputs, mask = qkv(), torch.rand(2, 1, 5, 5) > 0.5
    mask[0, 0, 3] = False
    if additive:
        mask = torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
    seen = ops.AttentionMask.of(mask)
    out = ops.attention(*inputs, seen, is_causal=causal)
    assert not out[0, :, 3].any()
    assert torch.equal(out, ops.attention(*inputs, mask, is_causal=causal))


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "options", [{}, {"max_score": 1.0}, {"max_score": 1.0, "cap_kind": "soft"}]
)
def test_bad_input_stays_visible(which, bad, options):
    inputs = [x.detach() for x in qkv()]
    # torch itself takes a query whose scores are all -Inf for a masked one.
    inputs[1][0, 0, :, 0] = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    inputs[which][0, 0, 1, 0] = bad
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[3] = False
    out = ops.attention(*inputs, mask, **options)
    assert not torch.isfinite(out[0, 0, 1]).all()
    assert torch.isfinite(out[1]).all()


def test_a_nan_in_an_additive_mask_stays_visible():
    mask = torch.zeros(5, 5)
    mask[1] = -math.inf
    mask[1, 1] = math.nan
    assert ops.attention(*qkv(), mask)[:, :, 1].isnan().all()


def test_bounded_scores_are_bounded_in_float16_too():
    """The product of 200 with itself over 8 channels is past the largest float16."""
    q = torch.full((1, 2, 8), 200.0, dtype=torch.float16, requires_grad=True)
    v = torch.ones(1, 2, 8, dtype=torch.float16)
    out = ops.attention(q, q, v, max_score=10.0)
    out.sum().backward()
    assert torch.isfinite(out).all()
    assert torch.isfinite(q.grad).all()
    with torch.autocast("cpu", dtype=torch.float16):
        out = ops.attention(q.float(), q.float(), v.float(), max_score=10.0)
    assert torch.isfinite(out).all()


def test_causal_with_bounded_scores_and_no_mask():
    inputs = qkv()
    out = ops.attention(*inputs, is_causal=True, max_score=99.0)
    torch.testing.assert_close(out, sdpa(*inputs, is_causal=True))


def test_dropout_drops():
    inputs = qkv()
    for options in ({}, {"max_score": 99.0}):
        torch.manual_seed(0)
        assert not torch.equal(
            ops.attention(*inputs, dropout_p=0.5, **options), ops.attention(*inputs, **options)
        )


def test_no_keys_at_all():
    query, none = torch.randn(1, 2, 8), torch.randn(1, 0, 8)
    out = ops.attention(query, none, none, torch.ones(2, 0, dtype=torch.bool))
    assert out.tolist() == [[[0.0] * 8] * 2]


def test_the_scale_comes_from_the_real_head_size():
    inputs = qkv()
    with pytest.raises(UsageError) as caught:
        ops.attention(*inputs, head_dim=64)
    assert "head_dim is 64, but the heads of this query have size 8" in str(caught.value)
    assert torch.equal(ops.attention(*inputs, head_dim=8), ops.attention(*inputs))
    own = ops.attention(*inputs, scale=0.5)
    torch.testing.assert_close(own, sdpa(*inputs, scale=0.5))
    with pytest.raises(UsageError, match="the limit is inf"):
        ops.attention(*inputs, scale=math.inf)
    with pytest.raises(UsageError, match="query has head size 8, key 4"):
        ops.attention(inputs[0], inputs[1][..., :4], inputs[2])
