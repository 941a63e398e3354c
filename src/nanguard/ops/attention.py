"""Softmax and attention in which a fully masked row is zero, and nothing else is changed.

Whether a row is fully masked is a matter of the mask, row by row, and never of the scores: a row
whose scores are all -Inf for another reason stays NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn import functional

from nanguard.errors import UsageError
from nanguard.ops.bounds import CapKind, any_kept, cap, check_limit, keep
from nanguard.ops.fused import MOST_GROUPS, apply, kernel, ready, traced

if TYPE_CHECKING:
    from torch import Tensor


def masked_softmax(
    scores: Tensor,
    mask: Tensor | None = None,
    dim: int = -1,
    *,
    max_score: float | None = None,
    cap_kind: CapKind = "hard",
) -> Tensor:
    """Returns the softmax over what the mask keeps; a row that keeps nothing is all zero.

    Prevents the NaN of a softmax over nothing but -Inf. The usual test,
    ``(scores == -inf).all()``, looks at the whole tensor and never fires for a single row. A
    masked-out NaN has no effect and gets no gradient; one that is kept makes its row NaN.

    Args:
        scores: Any floating-point tensor.
        mask: Boolean, True where a score counts; broadcast to the scores.
        dim: The dimension that sums to 1.
        max_score: Bounds the scores first, against saturation; none by default.
        cap_kind: How they are bounded, ``"hard"`` or ``"soft"``.
    """
    if mask is not None:
        _check_bool(mask, "masked_softmax")
    if max_score is not None:
        if mask is not None:
            # Neither cap may see what is masked out: a derivative at NaN is NaN, also times zero.
            scores = keep(scores, mask)
        scores = cap(scores, max_score, cap_kind)
    if mask is None:
        return torch.softmax(scores, dim)
    return cast("Tensor", apply(_MaskedSoftmax, scores, mask, dim))


class _MaskedSoftmax(torch.autograd.Function):
    """The derivative needs the result only, in which all that is masked is zero already."""

    generate_vmap_rule = True

    @staticmethod
    def forward(scores: Tensor, mask: Tensor, dim: int) -> Tensor:
        result = torch.softmax(torch.where(mask, scores, -math.inf), dim)
        # Counted from the end, a dimension is the same in a mask that has fewer of them.
        last = dim if dim < 0 else dim - scores.dim()
        empty = ~any_kept(mask, last) if -last <= mask.dim() else ~mask
        return result.masked_fill_(empty, 0.0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.dim = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (result,) = ctx.saved_tensors
        return torch._softmax_backward_data(grad, result, ctx.dim, result.dtype), None, None


@dataclass(frozen=True)
class AttentionMask:
    """A mask that was looked at once, for the many layers that use it.

    Attributes:
        mask: The mask, with every row that keeps nothing opened to all keys.
        keeps: Whether a row keeps anything, with a last dimension of 1.
    """

    mask: Tensor
    keeps: Tensor

    @classmethod
    def of(cls, mask: Tensor) -> AttentionMask:
        """Looks at a mask.

        Args:
            mask: Boolean, True where a query may look, or a floating-point mask that is added to
                the scores. It ends in (queries or 1, keys).
        """
        if mask.dtype == torch.bool:
            keeps = any_kept(mask, -1)
            return cls(mask | ~keeps, keeps)
        if not mask.is_floating_point():
            _check_bool(mask, "attention")
        # NaN is not a way to mask; it fails this test and stays visible.
        masked = mask.detach() <= torch.finfo(mask.dtype).min
        keeps = any_kept(~masked, -1)
        return cls(torch.where(keeps, mask, 0.0), keeps)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | AttentionMask | None = None,
    *,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    head_dim: int | None = None,
    max_score: float | None = None,
    cap_kind: CapKind = "hard",
) -> Tensor:
    """Returns scaled dot-product attention; a query that may look nowhere gets zeros.

    Prevents the NaN of a fully masked row, forward and backward, without looking at the scores: the
    row is opened to all keys for ``F.scaled_dot_product_attention`` and its result is replaced by
    zeros, with no gradient. Without a mask this *is* ``F.scaled_dot_product_attention``. NaN in a
    key or a value stays visible even if it is masked out. One thing torch's kernels hide: a query
    with an Inf that makes all of its scores -Inf passes for a masked one, and gets zeros.

    Args:
        query: Of shape (..., queries, head_dim).
        key: Of shape (..., keys, head_dim).
        value: Of shape (..., keys, any).
        mask: Boolean, True where a query may look, or a floating-point mask that is added to the
            scores; or an ``AttentionMask`` made from it, where several layers share one.
        is_causal: Whether a query may only look at keys up to its own place. Holds beside a mask.
        dropout_p: The share of weights that is dropped.
        scale: What scores are multiplied by; ``1 / sqrt(head_dim)`` by default, from the real size.
        head_dim: What the caller believes the head size to be; refused if it is not.
        max_score: Bounds the scaled scores, against saturation and overflow. Then the scores are
            computed in the open, which takes the memory that a fused kernel saves.
        cap_kind: How they are bounded, ``"hard"`` or ``"soft"``.
    """
    scale = _scale(query, key, scale, head_dim)
    beside = is_causal and (mask is not None or max_score is not None)
    if not beside and max_score is None:
        mask = _as_added(mask, query)
    seen = _seen(query, key, mask, is_causal=beside)
    if max_score is not None:
        check_limit(max_score, "attention")
        return _bounded(query, key, value, seen, dropout_p, scale, (max_score, cap_kind))
    if seen is None:
        return functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout_p, is_causal=is_causal, scale=scale
        )
    bias = seen.mask
    if bias.is_floating_point() and bias.dtype != query.dtype:
        bias = bias.to(query.dtype)
    out = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, dropout_p=dropout_p, scale=scale
    )
    return _without_empty(out, seen.keeps)


def _as_added(mask: Tensor | AttentionMask | None, query: Tensor) -> Any:
    """Returns a boolean mask as one that is added, which is what torch would make of it next."""
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool or mask.dim() < 2:
        return mask
    if not ready(query, mask, strided=True):
        return mask
    return AttentionMask(*_open_rows(mask, query.dtype))


def _without_empty(out: Tensor, keeps: Tensor) -> Tensor:
    """Returns what came of queries, with 0 for those that may look nowhere."""
    fits = out.dim() == 4 and out.stride(-1) == 1 and math.prod(out.shape[:2]) <= MOST_GROUPS
    if fits and not traced() and ready(out, keeps, strided=True):
        return cast("Tensor", apply(_EmptyRows, out, keeps))
    return keep(out, keeps)


class _EmptyRows(torch.autograd.Function):
    """Writes zeros into rows that may look nowhere, and touches no other.

    Torch keeps its result for the derivative of attention, where a row counts only as a factor of
    its gradient, and that is 0. So it may be written to, and autograd need not know.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, keeps: Tensor) -> Tensor:
        ctx.save_for_backward(keeps)
        return cast("Tensor", _zero_rows(out, keeps, False))  # noqa: FBT003

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (keeps,) = ctx.saved_tensors
        dense = type(grad) is torch.Tensor and grad.stride(-1) == 1
        if torch.is_grad_enabled() or not dense:
            return keep(grad, keeps), None
        return _zero_rows(grad, keeps, True), None  # noqa: FBT003


_open_rows = kernel("open_rows(Tensor mask, ScalarType dtype) -> (Tensor, Tensor)")
_zero_rows = kernel("zero_rows(Tensor x, Tensor keeps, bool copy) -> Tensor")


def _scale(query: Tensor, key: Tensor, scale: float | None, head_dim: int | None) -> float:
    """Returns the factor of the scores, from the size that the tensors really have."""
    size = query.shape[-1]
    if key.shape[-1] != size or size == 0:
        raise UsageError(
            f"query has head size {size}, key {key.shape[-1]}",
            where="nanguard.ops.attention",
            do="Split both into heads in the same way: (batch, heads, length, head_dim).",
        )
    if head_dim is not None and head_dim != size:
        raise UsageError(
            f"head_dim is {head_dim}, but the heads of this query have size {size}",
            where="nanguard.ops.attention",
            do="Take it from the tensor (query.shape[-1]) or leave it out.",
        )
    if scale is None:
        return 1 / math.sqrt(size)
    check_limit(abs(scale), "attention")
    return scale


def _seen(
    query: Tensor, key: Tensor, mask: Tensor | AttentionMask | None, *, is_causal: bool
) -> AttentionMask | None:
    """Returns the mask that is to be used, or None."""
    if not is_causal:
        return AttentionMask.of(mask) if isinstance(mask, torch.Tensor) else mask
    shape = (query.shape[-2], key.shape[-2])
    past = torch.ones(shape, dtype=torch.bool, device=query.device).tril()
    if mask is None:
        return AttentionMask.of(past)
    if isinstance(mask, AttentionMask):
        past, mask = past & mask.keeps, mask.mask
    if mask.dtype == torch.bool:
        return AttentionMask.of(mask & past)
    return AttentionMask.of(torch.where(past, mask, -math.inf))


def _bounded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: AttentionMask | None,
    dropout_p: float,
    scale: float,
    bound: tuple[float, CapKind],
) -> Tensor:
    """Returns attention with bounded scores, step by step: no fused kernel bounds them."""
    scores = cap(_scores(query, key, scale), *bound)
    if seen is not None:
        if seen.mask.dtype == torch.bool:
            scores = torch.where(seen.mask, scores, -math.inf)
        else:
            scores = scores + seen.mask
    weights = torch.softmax(scores, -1)
    if dropout_p:
        weights = torch.dropout(weights, dropout_p, train=True)
    out = weights.to(value.dtype) @ value
    return out if seen is None else keep(out, seen.keeps)


def _scores(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Returns the scaled scores; where products would be float16, in float32, as they overflow."""
    device = query.device.type
    casts = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16
    if not casts and query.dtype != torch.float16:
        return (query * scale) @ key.transpose(-2, -1)
    with torch.autocast(device, enabled=False):
        return (query.float() * scale) @ key.float().transpose(-2, -1)


def _check_bool(mask: Tensor, name: str) -> None:
    if mask.dtype != torch.bool:
        raise UsageError(
            f"the mask is {mask.dtype}",
            where=f"nanguard.ops.{name}",
            do="Give it a boolean mask, True where a value counts: mask.bool() or mask > 0.",
        )
