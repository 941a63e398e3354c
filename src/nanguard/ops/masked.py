"""Means and losses over what a mask keeps.

The mean of nothing is 0 with a zero gradient, and is counted where a counter is given. What is
masked out has no effect, even if it is NaN: values are chosen with ``where``, because the usual
product with the mask keeps a NaN (``0 * nan``). What is kept stays visible, whatever it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from nanguard.errors import UsageError
from nanguard.ops.bounds import check_float, keep, wide
from nanguard.ops.fused import again, apply, kernel, once, ready, rows_of
from nanguard.ops.labels import Labels, OnBad

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from nanguard.ops.labels import Counter


def masked_mean(
    values: Tensor,
    mask: Tensor,
    dim: int | Sequence[int] | None = None,
    *,
    keepdim: bool = False,
    empties: Counter | None = None,
) -> Tensor:
    """Returns the mean of what the mask keeps, and 0 where it keeps nothing.

    Prevents the 0/0 of ``(x * mask).sum() / mask.sum()`` on an empty mask, and the NaN that a
    padded position smuggles through the product. Halves are summed in float32.

    Args:
        values: Any floating-point tensor.
        mask: Boolean, True where a value counts; broadcast to the values.
        dim: The dimensions to reduce; all of them by default.
        keepdim: Whether to keep them with size 1.
        empties: Counts the means of nothing.
    """
    check_float(values, "masked_mean")
    _checked(mask, values, "masked_mean")
    if dim is None and not keepdim and _one_kernel(values, None, mask):
        return _fused(values, None, mask, empties)
    mean = _mean(keep(values, mask), mask, dim, keepdim=keepdim, empties=empties)
    return mean.to(values.dtype)


def masked_mse(
    prediction: Tensor,
    target: Tensor,
    mask: Tensor,
    dim: int | Sequence[int] | None = None,
    *,
    keepdim: bool = False,
    empties: Counter | None = None,
) -> Tensor:
    """Returns the mean squared error over what the mask keeps, and 0 where it keeps nothing.

    Prevents the same as ``masked_mean``, and squares that overflow in float16: halves are computed
    and returned in float32.

    Args:
        prediction: Any floating-point tensor.
        target: Of the same shape.
        mask: Boolean, True where an element counts; broadcast to the prediction.
        dim: The dimensions to reduce; all of them by default.
        keepdim: Whether to keep them with size 1.
        empties: Counts the means of nothing.
    """
    check_float(prediction, "masked_mse")
    if prediction.shape != target.shape:
        raise UsageError(
            f"the prediction has shape {tuple(prediction.shape)}, the target {tuple(target.shape)}",
            where="nanguard.ops.masked_mse",
            do="Give both the same shape; broadcasting them is mostly a mistake.",
        )
    _checked(mask, prediction, "masked_mse")
    if dim is None and not keepdim and _one_kernel(prediction, target, mask):
        return _fused(prediction, target, mask, empties)
    kept = keep(_gap(prediction, target), mask)
    return _mean(kept.square(), mask, dim, keepdim=keepdim, empties=empties)


def _gap(prediction: Tensor, target: Tensor) -> Tensor:
    dtype = wide(prediction.dtype)
    return prediction.to(dtype) - target.to(dtype)


def masked_cross_entropy(
    logits: Tensor,
    target: Tensor,
    mask: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    on_bad: OnBad = "nan",
    empties: Counter | None = None,
    bad_labels: Counter | None = None,
) -> Tensor:
    """Returns the mean cross-entropy over what the mask keeps, and 0 where it keeps nothing.

    Prevents the 0/0 of ``F.cross_entropy`` on a batch in which every target is ignored, and the NaN
    gradient of logits that are NaN where nobody looks: ``F.cross_entropy`` gives such a row
    ``0 * nan``. Halves are computed and returned in float32.

    Args:
        logits: Of shape (..., classes).
        target: Class numbers, of shape (...).
        mask: Boolean, True where a target counts; broadcast to the targets.
        ignore_index: Targets with this value do not count either.
        label_smoothing: How much of the target is spread over all classes.
        on_bad: What a label out of range does: see ``checked_cross_entropy``. By default the loss
            is NaN, for which nothing has to wait.
        empties: Counts the means of nothing.
        bad_labels: Counts labels out of range.
    """
    mask = _checked(mask, target, "masked_cross_entropy").expand_as(target)
    labels = Labels(target, mask, None, ignore_index, label_smoothing, on_bad, bad_labels)
    return labels.reduced(logits, mean=True, empties=empties)


def _one_kernel(values: Tensor, other: Tensor | None, mask: Tensor) -> bool:
    both = (values,) if other is None else (values, other)
    return ready(*both, mask) and rows_of(mask, values) is not None


def _fused(values: Tensor, other: Tensor | None, mask: Tensor, empties: Counter | None) -> Tensor:
    mean, count = apply(_FusedMean, values, other, mask)
    if empties is not None:
        empties.add(count == 0)
    return cast("Tensor", mean)


class _FusedMean(torch.autograd.Function):
    """The mean of values, or of squared gaps: every number is read once each way."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, other: Tensor | None, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        dtype = values.dtype if other is None else wide(values.dtype)
        mean, count = _masked_mean(values, other, mask, dtype)
        ctx.save_for_backward(values, other, mask, count)
        ctx.mark_non_differentiable(count)
        ctx.set_materialize_grads(False)
        return mean, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
        if grad is None:
            return None, None, None
        values, other, mask, count = ctx.saved_tensors
        to_values, to_other = ctx.needs_input_grad[:2]
        if not once(grad):
            inputs, wanted = (values, other, mask), (to_values, to_other, False)
            return again(_plain_mean, inputs, grad, wanted)
        slope = _masked_mean_slope(grad, values, other, mask, count)
        return slope if to_values else None, -slope if to_other else None, None


def _plain_mean(values: Tensor, other: Tensor | None, mask: Tensor) -> Tensor:
    kept = keep(values if other is None else _gap(values, other), mask)
    kept = kept if other is None else kept.square()
    mean = _mean(kept, mask, None, keepdim=False, empties=None)
    return mean.to(values.dtype) if other is None else mean


_masked_mean = kernel(
    "masked_mean(Tensor x, Tensor? y, Tensor mask, ScalarType dtype) -> (Tensor, Tensor)"
)
_masked_mean_slope = kernel(
    "masked_mean_slope(Tensor grad, Tensor x, Tensor? y, Tensor mask, Tensor count) -> Tensor"
)


def _mean(
    kept: Tensor,
    mask: Tensor,
    dim: int | Sequence[int] | None,
    *,
    keepdim: bool,
    empties: Counter | None,
) -> Tensor:
    """Returns the sum of values that are zero wherever the mask is False, by the number kept."""
    if dim is None:
        dims = tuple(range(kept.dim()))
        # A mask that is broadcast need not be read once for each copy.
        count = mask.sum() * (kept.numel() // max(mask.numel(), 1))
        count = count.reshape((1,) * kept.dim()) if keepdim else count
    else:
        dims = (dim,) if isinstance(dim, int) else tuple(dim)
        count = mask.expand_as(kept).sum(dims, keepdim=keepdim)
    if empties is not None:
        empties.add(count == 0)
    return kept.sum(dims, keepdim=keepdim, dtype=wide(kept.dtype)) / count.clamp(min=1)


def _checked(mask: Tensor, values: Tensor, name: str) -> Tensor:
    """Returns the mask, if it is one for these values."""
    where = f"nanguard.ops.{name}"
    if mask.dtype != torch.bool:
        raise UsageError(
            f"the mask is {mask.dtype}",
            where=where,
            do="Give it a boolean mask, True where a value counts: mask.bool() or mask > 0.",
        )
    if mask.shape != values.shape and not _fits(mask.shape, values.shape):
        raise UsageError(
            f"a mask of shape {tuple(mask.shape)} does not fit values of {tuple(values.shape)}",
            where=where,
            do="Give it one dimension for each of the values', of size 1 where it is shared.",
        )
    return mask


def _fits(small: Sequence[int], large: Sequence[int]) -> bool:
    """Returns whether a shape can be broadcast to another."""
    last = large[len(large) - len(small) :]
    return len(small) <= len(large) and all(a in (1, b) for a, b in zip(small, last, strict=True))
