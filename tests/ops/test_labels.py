"""Cross-entropy that looks at its labels, and masked logits."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from nanguard import ops
from nanguard.errors import UsageError

GOOD = torch.tensor([0, 4, 2])
HIGH = torch.tensor([0, 5, 2])
LOW = torch.tensor([0, -1, 2])


def logits() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(3, 5, dtype=torch.float64, requires_grad=True)


def test_good_labels_give_torch_s_own_loss():
    x = logits()
    for reduction in ("mean", "sum", "none"):
        ours = ops.checked_cross_entropy(x, GOOD, reduction=reduction)
        torch.testing.assert_close(ours, functional.cross_entropy(x, GOOD, reduction=reduction))


@pytest.mark.parametrize(("target", "label"), [(HIGH, 5), (LOW, -1)])
def test_a_label_out_of_range_is_refused_with_its_place(target, label):
    with pytest.raises(UsageError) as caught:
        ops.checked_cross_entropy(logits(), target)
    text = str(caught.value)
    assert f"label {label} at (1,) is not one of 0 to 4 (1 of 3 labels are bad)" in text
    assert "Fix the label map" in text


@pytest.mark.parametrize("target", [HIGH, LOW])
@pytest.mark.parametrize("mode", ["ignore", "report"])
def test_left_out_and_counted_never_clamped(target, mode):
    x, bad = logits(), ops.Counter()
    loss = ops.checked_cross_entropy(x, target, on_bad=mode, bad_labels=bad)
    torch.testing.assert_close(loss, functional.cross_entropy(x[[0, 2]], GOOD[[0, 2]]))
    (slope,) = torch.autograd.grad(loss, x)
    assert not slope[1].any()
    assert bad.value() == 1


def test_a_bad_label_makes_the_loss_nan_without_waiting():
    losses = ops.checked_cross_entropy(logits(), HIGH, on_bad="nan", reduction="none")
    assert losses.isnan().tolist() == [False, True, False]
    assert math.isnan(ops.checked_cross_entropy(logits(), HIGH, on_bad="nan").item())


def test_nothing_but_bad_labels_is_a_mean_of_nothing():
    empties = ops.Counter()
    target = torch.full((3,), 9)
    loss = ops.checked_cross_entropy(logits(), target, on_bad="ignore", empties=empties)
    assert loss.item() == 0.0
    assert empties.value() == 1


def test_report_insists_on_a_counter_and_other_words_are_refused():
    with pytest.raises(UsageError, match="on_bad is 'report' and there is no counter"):
        ops.checked_cross_entropy(logits(), GOOD, on_bad="report")
    with pytest.raises(UsageError, match="on_bad is 'clamp'"):
        ops.checked_cross_entropy(logits(), GOOD, on_bad="clamp")
    with pytest.raises(UsageError, match="reduction is 'median'"):
        ops.checked_cross_entropy(logits(), GOOD, reduction="median")
    with pytest.raises(UsageError, match="label_smoothing is 1"):
        ops.checked_cross_entropy(logits(), GOOD, label_smoothing=1)
    with pytest.raises(UsageError, match="on_bad is 'ignore'"):
        ops.mask_logits(logits(), torch.ones(5, dtype=torch.bool), on_bad="ignore")


def test_shapes_and_types_are_refused():
    with pytest.raises(
        UsageError, match=r"logits of shape \(3, 5\) do not fit targets of \(3, 5\)"
    ):
        ops.checked_cross_entropy(logits(), torch.zeros(3, 5, dtype=torch.int64))
    with pytest.raises(UsageError, match=r"the targets are torch.float32"):
        ops.checked_cross_entropy(logits(), torch.zeros(3))
    with pytest.raises(UsageError, match=r"the mask of classes is torch.bool of shape \(4,\)"):
        ops.checked_cross_entropy(logits(), GOOD, allowed=torch.ones(4, dtype=torch.bool))
    with pytest.raises(UsageError, match=r"the mask of classes is torch.float32"):
        ops.mask_logits(logits(), torch.ones(5))


ALLOWED = torch.tensor(
    [[True, True, False, False, True], [False, False, True, True, True], [True] * 5]
)


def test_classes_that_a_sample_cannot_have_are_left_out_of_loss_and_smoothing():
    x = logits()
    for smoothing in (0.0, 0.1):
        ours = ops.checked_cross_entropy(
            x, GOOD, allowed=ALLOWED, label_smoothing=smoothing, reduction="none"
        )
        rows = []
        for row, allowed, target in zip(x, ALLOWED, GOOD, strict=True):
            place = int(allowed[: int(target)].sum())
            rows.append(
                functional.cross_entropy(
                    row[allowed], torch.tensor(place), label_smoothing=smoothing
                )
            )
        torch.testing.assert_close(ours, torch.stack(rows))
        (slope,) = torch.autograd.grad(ours.sum(), x)
        assert not slope[~ALLOWED].any()


def test_a_nan_in_a_masked_class_has_no_effect():
    clean, dirty = logits().detach(), logits().detach()
    dirty[~ALLOWED] = math.nan
    slopes = []
    for x in (clean, dirty):
        x.requires_grad_()
        loss = ops.checked_cross_entropy(x, GOOD, allowed=ALLOWED, label_smoothing=0.1)
        slopes.append(torch.autograd.grad(loss, x)[0])
    assert torch.equal(*slopes)


def test_a_target_whose_class_is_masked_is_refused():
    target = torch.tensor([2, 4, 2])
    with pytest.raises(UsageError) as caught:
        ops.checked_cross_entropy(logits(), target, allowed=ALLOWED)
    assert "label 2 at (0,) is a class that is masked for this sample" in str(caught.value)
    x = logits()
    loss = ops.checked_cross_entropy(x, target, allowed=ALLOWED, on_bad="ignore")
    rest = ops.checked_cross_entropy(x[1:], target[1:], allowed=ALLOWED[1:])
    torch.testing.assert_close(loss, rest)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_masked_logits_are_finite_and_weigh_nothing(dtype):
    x = logits().to(dtype)
    masked = ops.mask_logits(x, ALLOWED, GOOD)
    assert torch.isfinite(masked).all()
    assert masked.dtype == dtype
    assert torch.equal(masked[ALLOWED], x[ALLOWED])
    assert not masked.softmax(-1)[~ALLOWED].any()
    assert torch.isfinite(functional.cross_entropy(masked, GOOD))


def test_masking_refuses_a_masked_target_and_a_sample_without_classes():
    with pytest.raises(UsageError) as caught:
        ops.mask_logits(logits(), ALLOWED, torch.tensor([0, 0, 0]))
    assert "the target 0 of the sample at (1,) is masked or out of range" in str(caught.value)
    with pytest.raises(UsageError, match="the target 5 of the sample"):
        ops.mask_logits(logits(), ALLOWED, HIGH)
    nothing = ALLOWED.clone()
    nothing[2] = False
    with pytest.raises(UsageError, match=r"no class is left for the sample at \(2,\)"):
        ops.mask_logits(logits(), nothing)
    assert ops.mask_logits(logits(), ALLOWED, torch.tensor([0, -100, 0])).shape == (3, 5)


def test_masking_shows_a_masked_target_as_nan_without_waiting():
    bad = ops.Counter()
    masked = ops.mask_logits(
        logits(), ALLOWED, torch.tensor([0, 0, 0]), on_bad="nan", bad_labels=bad
    )
    assert torch.isfinite(masked).all(-1).tolist() == [True, False, True]
    assert bad.value() == 1


def test_one_mask_for_all_samples():
    allowed = torch.tensor([True, False, True, True, True])
    masked = ops.mask_logits(logits(), allowed, GOOD)
    assert masked[:, 1].tolist() == [torch.finfo(torch.float64).min / 2] * 3
    loss = ops.checked_cross_entropy(logits(), GOOD, allowed=allowed, label_smoothing=0.1)
    assert torch.isfinite(loss)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_computed_in_float32(dtype):
    x = torch.full((2, 5), 3.0, dtype=dtype, requires_grad=True)
    loss = ops.checked_cross_entropy(x, GOOD[:2])
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(math.log(5), rel=1e-6)
    assert x.grad.dtype == dtype
