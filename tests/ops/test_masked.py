"""Means and losses over a mask."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from nanguard import ops
from nanguard.errors import UsageError

NONE = torch.zeros(2, 3, dtype=torch.bool)
SOME = torch.tensor([[True, False, True], [False, False, False]])
TARGET = torch.tensor([[0, 3, 1], [2, 2, 0]])


def loss_of(name: str, x: torch.Tensor, mask: torch.Tensor, **options) -> torch.Tensor:
    if name == "mean":
        return ops.masked_mean(x[..., 0], mask, **options)
    if name == "mse":
        return ops.masked_mse(x[..., 0], torch.ones_like(x[..., 0]), mask, **options)
    return ops.masked_cross_entropy(x, TARGET, mask, **options)


every_loss = pytest.mark.parametrize("name", ["mean", "mse", "cross-entropy"])


@every_loss
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_over_nothing_it_is_zero_with_no_gradient_and_is_counted(name, dtype):
    x = torch.full((2, 3, 4), math.nan, dtype=dtype, requires_grad=True)
    empties = ops.Counter()
    loss = loss_of(name, x, NONE, empties=empties)
    loss.backward()
    assert loss.item() == 0.0
    assert not x.grad.any()
    assert torch.isfinite(x.grad).all()
    assert empties.value() == 1
    loss_of(name, torch.ones(2, 3, 4, dtype=dtype), SOME, empties=empties)
    assert empties.value() == 1


@every_loss
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_masked_out_has_no_effect_and_gets_no_gradient(name, bad):
    torch.manual_seed(0)
    clean = torch.randn(2, 3, 4)
    dirty = clean.clone()
    dirty[~SOME] = bad
    slopes = []
    for x in (clean, dirty):
        x.requires_grad_()
        loss = loss_of(name, x, SOME)
        (slope,) = torch.autograd.grad(loss, x)
        slopes.append((loss, slope))
    assert slopes[0][0].item() == slopes[1][0].item()
    assert torch.equal(slopes[0][1], slopes[1][1])
    assert not slopes[1][1][~SOME].any()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_masked_nan_gets_no_gradient_in_a_compiled_loss_and_with_many_classes():
    """Vectorised kernels and their tails have to choose alike."""
    compiled = torch.compile(
        lambda x, target, mask: ops.masked_cross_entropy(x, target, mask, label_smoothing=0.1),
        backend="aot_eager",
        fullgraph=True,
    )
    x = torch.randn(4, 101)
    x[1:3] = torch.tensor([[math.nan], [math.inf]])
    x.requires_grad_()
    mask = torch.tensor([True, False, False, True])
    for loss in (compiled, ops.masked_cross_entropy):
        (slope,) = torch.autograd.grad(loss(x, torch.arange(4), mask), x, torch.tensor(2.0))
        assert not slope[1:3].any()
        assert torch.isfinite(slope).all()
        assert slope[[0, 3]].any(-1).all()


@pytest.mark.parametrize("name", ["mse", "cross-entropy"])
def test_a_masked_nan_reaches_no_second_derivative(name):
    x = torch.randn(2, 3, 4)
    x[~SOME] = math.nan
    x.requires_grad_()
    (slope,) = torch.autograd.grad(loss_of(name, x, SOME), x, create_graph=True)
    (second,) = torch.autograd.grad(slope.square().sum(), x)
    assert torch.isfinite(second).all()
    assert second[SOME].any()


@every_loss
def test_what_is_kept_stays_visible_in_the_gradient_too(name):
    x = torch.zeros(2, 3, 4)
    x[0, 0, 0] = math.nan
    x.requires_grad_()
    loss = loss_of(name, x, SOME)
    assert math.isnan(loss.item())
    if name != "mean":
        loss.backward()
        assert not torch.isfinite(x.grad[0, 0]).all()
        assert torch.isfinite(x.grad[1]).all()


def test_means_along_dimensions():
    x = torch.arange(6.0).view(2, 3)
    empties = ops.Counter()
    assert ops.masked_mean(x, SOME, -1, empties=empties).tolist() == [1.0, 0.0]
    assert empties.value() == 1
    assert ops.masked_mean(x, SOME, 0).tolist() == [0.0, 0.0, 2.0]
    assert ops.masked_mean(x, SOME, (0, 1), keepdim=True).tolist() == [[1.0]]
    assert ops.masked_mean(x, SOME, keepdim=True).tolist() == [[1.0]]
    assert ops.masked_mse(x, x + 2, SOME, 1, keepdim=True).tolist() == [[4.0], [0.0]]


def test_a_mask_that_is_shared_counts_once_for_each_value():
    x = torch.randn(4, 3, 5)
    mask = torch.tensor([True, False, True, True]).view(4, 1, 1)
    torch.testing.assert_close(ops.masked_mean(x, mask), x[[0, 2, 3]].mean())
    torch.testing.assert_close(ops.masked_mean(x, mask, 0), x[[0, 2, 3]].mean(0))
    torch.testing.assert_close(ops.masked_mse(x, x * 0, mask), x[[0, 2, 3]].square().mean())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_summed_and_squared_in_float32(dtype):
    x = torch.full((1000,), 300.0, dtype=dtype)
    mask = torch.ones(1000, dtype=torch.bool)
    assert ops.masked_mean(x, mask).item() == 300.0
    assert ops.masked_mean(x, mask).dtype == dtype
    loss = ops.masked_mse(x, torch.zeros_like(x), mask)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(90000.0)


def test_a_float16_difference_that_overflows():
    x = torch.tensor([60000.0], dtype=torch.float16)
    assert ops.masked_mse(x, -x, x > 0).item() == pytest.approx(1.44e10, rel=0.01)


def test_wrong_masks_and_shapes_are_refused():
    x = torch.ones(2, 3, 4)
    with pytest.raises(UsageError, match=r"the mask is torch.float32"):
        ops.masked_mean(x, torch.ones(2, 3, 4))
    with pytest.raises(
        UsageError, match=r"a mask of shape \(2, 3\) does not fit values of \(2, 3, 4\)"
    ):
        ops.masked_mean(x, SOME)
    with pytest.raises(UsageError, match=r"a mask of shape \(2, 2, 3, 4\) does not fit"):
        ops.masked_mse(x, x, torch.ones(2, 2, 3, 4, dtype=torch.bool))
    with pytest.raises(
        UsageError, match=r"the prediction has shape \(2, 3, 4\), the target \(4,\)"
    ):
        ops.masked_mse(x, torch.ones(4), torch.ones(4, dtype=torch.bool))
    with pytest.raises(UsageError, match=r"the input is torch.int64"):
        ops.masked_mean(torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.bool))


def test_cross_entropy_equals_torch_s_own_with_ignored_targets():
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    target = TARGET.clone()
    target[0, 0] = -100
    every = torch.ones(2, 3, dtype=torch.bool)
    for smoothing in (0.0, 0.2):
        ours = ops.masked_cross_entropy(logits, target, every, label_smoothing=smoothing)
        theirs = functional.cross_entropy(
            logits.flatten(0, 1), target.flatten(), label_smoothing=smoothing
        )
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(
            torch.autograd.grad(ours, logits), torch.autograd.grad(theirs, logits)
        )


def test_cross_entropy_with_an_ignored_class_in_range():
    logits = torch.randn(2, 3, 4)
    every = torch.ones(2, 3, dtype=torch.bool)
    ours = ops.masked_cross_entropy(logits, TARGET, every, ignore_index=2)
    theirs = functional.cross_entropy(logits.flatten(0, 1), TARGET.flatten(), ignore_index=2)
    torch.testing.assert_close(ours, theirs)


def test_the_loss_of_a_label_out_of_range_is_nan_and_counted_unless_it_is_masked_out():
    target = TARGET.clone()
    target[1, 0] = 4
    bad = ops.Counter()
    logits = torch.zeros(2, 3, 4)
    assert torch.isfinite(ops.masked_cross_entropy(logits, target, SOME, bad_labels=bad))
    assert bad.value() == 0
    every = torch.ones(2, 3, dtype=torch.bool)
    assert math.isnan(ops.masked_cross_entropy(logits, target, every, bad_labels=bad).item())
    assert bad.value() == 1
