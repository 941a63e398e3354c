"""Kernels that go from row to row: norms, deviations, modulation, cross-entropies, masked means."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, misc"
# Triton reads the functions marked jit, and its constants are capitals.
# ruff: noqa: ANN001, ANN202, N803, FBT001, SIM102

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nanguard.ops.kernels.pointwise import (
    BLOCK,
    block_of,
    blocks,
    launch,
    power_above,
    stride_of,
    warps_of,
)

if TYPE_CHECKING:
    from torch import Tensor

PROGRAMS = 1024  # programs that share the sum over a whole tensor


@triton.jit
def _mask_logits(
    logits, allowed, target, out, bad, low, classes, stride,
    TARGET: tl.constexpr, BAD: tl.constexpr, NAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    some = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, classes, BLOCK):
        at = start + tl.arange(0, BLOCK)
        some |= tl.load(allowed + row * stride + at, at < classes, 0).to(tl.int32)
    wrong = tl.max(some, 0) == 0
    if TARGET:
        label = tl.load(target + row)
        inside = (label >= 0) & (label < classes)
        permitted = tl.load(allowed + row * stride + tl.where(inside, label, 0)) != 0
        wrong = wrong | ((label >= 0) & ((label >= classes) | (permitted == 0)))
    other = low
    if NAN:
        other = tl.where(wrong, float("nan"), low)
    for start in range(0, classes, BLOCK):
        at = start + tl.arange(0, BLOCK)
        keep = tl.load(allowed + row * stride + at, at < classes, 0) != 0
        value = tl.load(logits + row * classes + at, at < classes, 0.0).to(tl.float32)
        value = tl.where(keep, value, other)
        tl.store(out + row * classes + at, value.to(out.dtype.element_ty), at < classes)
    if BAD:
        tl.store(bad + row, wrong)


def mask_logits(
    logits: Tensor, allowed: Tensor, target: Tensor | None, bad: Tensor | None, nan: bool
) -> Tensor:
    """Returns masked logits; those of a sample without a class, or with a masked target, NaN.

    Args:
        logits: Of shape (..., classes).
        allowed: The classes of each sample, or of all of them.
        target: Class numbers; None if only the classes are looked at.
        bad: Where to note which samples are bad; None if nobody asks.
        nan: Whether bad samples get NaN at all.
    """
    out = torch.empty_like(logits)
    classes = logits.shape[-1]
    low = torch.finfo(logits.dtype).min / 2
    block, stride = block_of(classes), stride_of(allowed, logits)
    given = (target is not None, bad is not None)
    launch(
        _mask_logits, (logits.numel() // classes,), (logits, allowed, target, out, bad), low,
        classes, stride, *given, nan, block, warps=warps_of(block),
    )  # fmt: skip
    return out


@triton.jit
def _label_loss(
    logits, allowed, target, mask, numbers, ignore, classes, stride,
    ALLOWED: tl.constexpr, MASK: tl.constexpr, NAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    label = tl.load(target + row)
    counts = label != ignore
    if MASK:
        counts = counts & (tl.load(mask + row) != 0)
    inside = (label >= 0) & (label < classes)
    kept = counts & inside
    index = tl.where(inside, label, 0)
    if ALLOWED:
        kept = kept & (tl.load(allowed + row * stride + index) != 0)
    low = -3.4028234663852886e38 / 2
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, classes, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(logits + row * classes + at, at < classes, float("-inf")).to(tl.float32)
        if ALLOWED:
            keep = tl.load(allowed + row * stride + at, at < classes, 1) != 0
            value = tl.where(keep, value, low)
        # NaN has to win, so that the row's loss is NaN.
        higher = tl.where((value > best) | (value != value), value, best)
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(best - shift) + tl.exp(value - shift)
        best = higher
    # A NaN or Inf of any lane is in its total; the highest of the others is enough here.
    highest = tl.max(tl.where(best == best, best, float("-inf")), 0)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    log = tl.log(tl.sum(total * tl.exp(best - highest), 0)) + highest
    here = tl.load(logits + row * classes + index).to(tl.float32)
    loss = tl.where(kept, log - here, 0.0)
    if NAN:
        loss = tl.where(counts & (kept == 0), float("nan"), loss)
    state = tl.where(kept, 1.0, tl.where(counts, 2.0, 0.0))
    tl.store(numbers + row, loss)
    tl.store(numbers + rows + row, log)
    tl.store(numbers + 2 * rows + row, state)
    if row == 0:
        tl.store(numbers + 3 * rows, 0.0)


@triton.jit
def _label_loss_slope(
    grad, logits, allowed, target, numbers, result, classes, stride, each,
    ALLOWED: tl.constexpr, MEAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    kept = tl.load(numbers + 2 * rows + row) == 1
    slope = tl.load(grad + row * each).to(tl.float32)
    if MEAN:
        slope = tl.div_rn(slope, tl.maximum(tl.load(numbers + 3 * rows), 1.0))
    # Nothing of the loss: a row whose loss is NaN gets a gradient that is NaN.
    slope = tl.where(kept, slope + tl.load(numbers + row) * 0, 0.0)
    label = tl.where(kept, tl.load(target + row), -1)
    log = tl.load(numbers + rows + row)
    low = -3.4028234663852886e38 / 2
    for start in range(0, classes, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(logits + row * classes + at, at < classes, 0.0).to(tl.float32)
        if ALLOWED:
            keep = tl.load(allowed + row * stride + at, at < classes, 1) != 0
            value = tl.where(keep, value, low)
        share = tl.exp(value - log) - tl.where(at == label, 1.0, 0.0)
        share = tl.where(kept, share * slope, 0.0)
        tl.store(result + row * classes + at, share.to(result.dtype.element_ty), at < classes)


@triton.jit
def _mean_loss(numbers, mean, rows, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    count = tl.zeros((BLOCK,), tl.int64)
    states = numbers + 2 * rows
    for start in range(0, rows, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(numbers + at, at < rows, 0.0)
        count += tl.where(tl.load(states + at, at < rows, 0.0) == 1, 1, 0)
    whole, number = tl.sum(total, 0), tl.sum(count, 0).to(tl.float32)
    if MEAN:
        whole = tl.div_rn(whole, tl.maximum(number, 1.0))
    tl.store(mean, whole)
    tl.store(states + rows, number)


def label_loss(
    logits: Tensor, target: Tensor, allowed: Tensor | None, mask: Tensor | None, ignore: int,
    nan: bool,
) -> Tensor:  # fmt: skip
    """Returns all losses, the logs of all sums of exponentials, what all labels are, and a 0.

    One after the other in one tensor, as each tensor takes the host a while to make.
    """
    classes, rows = logits.shape[-1], target.numel()
    numbers = torch.empty(3 * rows + 1, dtype=torch.float32, device=logits.device)
    block = block_of(classes)
    stride = 0 if allowed is None else stride_of(allowed, logits)
    given = (allowed is not None, mask is not None)
    launch(
        _label_loss, (rows,), (logits, allowed, target, mask, numbers), ignore, classes, stride,
        *given, nan, block, warps=warps_of(block),
    )  # fmt: skip
    return numbers


def mean_loss(numbers: Tensor, mean: bool) -> Tensor:
    """Returns the mean or the sum of losses; the last number becomes how many labels were kept."""
    whole = torch.empty((), dtype=torch.float32, device=numbers.device)
    launch(_mean_loss, (1,), (numbers, whole), numbers.numel() // 3, mean, BLOCK)
    return whole


def label_loss_slope(
    grad: Tensor, logits: Tensor, target: Tensor, allowed: Tensor | None, numbers: Tensor,
    mean: bool,
) -> Tensor:  # fmt: skip
    """Returns the gradient to the logits, from that of each loss, of their sum or of their mean."""
    result = torch.empty_like(logits)
    classes = logits.shape[-1]
    block = block_of(classes)
    stride = 0 if allowed is None else stride_of(allowed, logits)
    launch(
        _label_loss_slope, (target.numel(),), (grad, logits, allowed, target, numbers, result),
        classes, stride, 1 if grad.dim() else 0, allowed is not None, mean, block,
        warps=warps_of(block),
    )  # fmt: skip
    return result


@triton.jit
def _partial_sums(
    x, y, mask, parts, n, inner, PAIR: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    total = tl.zeros((BLOCK,), tl.float32)
    count = tl.zeros((BLOCK,), tl.int64)
    step = programs.to(tl.int64) * BLOCK
    for start in range(program * BLOCK, n, step):
        at = start + tl.arange(0, BLOCK)
        keep = tl.load(mask + at // inner, at < n, 0) != 0
        value = tl.load(x + at, at < n, 0.0).to(tl.float32)
        if PAIR:
            value = value - tl.load(y + at, at < n, 0.0).to(tl.float32)
            value = value * value
        total += tl.where(keep, value, 0.0)
        count += tl.where(keep, 1, 0)
    tl.store(parts + program, tl.sum(total, 0).to(tl.float64))
    tl.store(parts + programs + program, tl.sum(count, 0).to(tl.float64))


@triton.jit
def _whole_mean(parts, mean, count, programs, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    total = tl.sum(tl.load(parts + at, at < programs, 0.0).to(tl.float32), 0)
    number = tl.sum(tl.load(parts + programs + at, at < programs, 0.0), 0).to(tl.int64)
    value = tl.div_rn(total, tl.maximum(number, 1).to(tl.float32))
    tl.store(mean, value.to(mean.dtype.element_ty))
    tl.store(count, number)


@triton.jit
def _masked_mean_slope(
    grad, x, y, mask, count, result, n, inner, PAIR: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slope = tl.load(grad).to(tl.float32)
    slope = tl.div_rn(slope, tl.maximum(tl.load(count), 1).to(tl.float32))
    keep = tl.load(mask + at // inner, at < n, 0) != 0
    value = tl.zeros((BLOCK,), tl.float32) + slope
    if PAIR:
        gap = tl.load(x + at, at < n, 0.0).to(tl.float32)
        gap = gap - tl.load(y + at, at < n, 0.0).to(tl.float32)
        value = 2 * gap * slope
    value = tl.where(keep, value, 0.0)
    tl.store(result + at, value.to(result.dtype.element_ty), at < n)


def masked_mean(
    x: Tensor, y: Tensor | None, mask: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns the mean of values, or of squared gaps, where a mask keeps them; and their number."""
    n = x.numel()
    programs = min(triton.cdiv(n, BLOCK), PROGRAMS)
    # The sums of all programs, and then how many values each of them kept.
    parts = torch.empty(2 * programs, dtype=torch.float64, device=x.device)
    mean = torch.empty((), dtype=dtype, device=x.device)
    count = torch.empty((), dtype=torch.int64, device=x.device)
    pair, inner = y is not None, n // mask.numel()
    launch(_partial_sums, (programs,), (x, y, mask, parts), n, inner, pair, BLOCK)
    launch(_whole_mean, (1,), (parts, mean, count), programs, power_above(programs))
    return mean, count


def masked_mean_slope(
    grad: Tensor, x: Tensor, y: Tensor | None, mask: Tensor, count: Tensor
) -> Tensor:
    """Returns the gradient of ``masked_mean`` to its first values."""
    result = torch.empty_like(x)
    n = x.numel()
    tensors, inner = (grad, x, y, mask, count, result), n // mask.numel()
    launch(_masked_mean_slope, (blocks(n),), tensors, n, inner, y is not None, BLOCK)
    return result


@triton.jit
def _norm(x, out, eps, inner, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, inner, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * inner + at, at < inner, 0.0).to(tl.float32)
        total += value * value
    norm = tl.sqrt_rn(tl.sum(total, 0))
    tl.store(out + row, tl.where(norm <= eps, eps, norm))


@triton.jit
def _norm_slope(grad, x, norm, result, eps, inner, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    size = tl.load(norm + row)
    factor = tl.where(size <= eps, 0.0, tl.div_rn(tl.load(grad + row), size))
    for start in range(0, inner, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * inner + at, at < inner, 0.0).to(tl.float32) * factor
        tl.store(result + row * inner + at, value.to(result.dtype.element_ty), at < inner)


def norm(x: Tensor, shape: tuple[int, ...], eps: float) -> Tensor:
    """Returns the norm of each row, in float32, at least ``eps``, in a tensor of a shape."""
    out = torch.empty(shape, dtype=torch.float32, device=x.device)
    rows = out.numel()
    inner = x.numel() // rows
    launch(_norm, (rows,), (x, out), float(eps), inner, block_of(inner))
    return out


def norm_slope(grad: Tensor, x: Tensor, norm: Tensor, eps: float) -> Tensor:
    """Returns the gradient of ``norm``."""
    result = torch.empty_like(x)
    inner = x.numel() // norm.numel()
    launch(
        _norm_slope, (norm.numel(),), (grad, x, norm, result), float(eps), inner, block_of(inner)
    )
    return result


@triton.jit
def _std(x, out, means, eps, divisor, inner, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    value = tl.load(x + row * inner + at, at < inner, 0.0).to(tl.float32)
    mean = tl.sum(value, 0) / inner
    gap = tl.where(at < inner, value - mean, 0.0)
    std = tl.sqrt_rn(tl.div_rn(tl.sum(gap * gap, 0), divisor))
    tl.store(out + row, tl.where(std <= eps, eps, std).to(out.dtype.element_ty))
    tl.store(means + row, mean)


@triton.jit
def _std_slope(grad, x, std, means, result, eps, divisor, inner, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    size = tl.load(std + row).to(tl.float32)
    slope = tl.load(grad + row).to(tl.float32)
    factor = tl.where(size <= eps, 0.0, tl.div_rn(slope, size * divisor))
    value = tl.load(x + row * inner + at, at < inner, 0.0).to(tl.float32) - tl.load(means + row)
    value = value * factor
    tl.store(result + row * inner + at, value.to(result.dtype.element_ty), at < inner)


def std(x: Tensor, shape: tuple[int, ...], eps: float, divisor: int) -> tuple[Tensor, Tensor]:
    """Returns the deviation of each row, at least ``eps``, in a tensor of a shape; and its mean."""
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    means = torch.empty(shape, dtype=torch.float32, device=x.device)
    rows = out.numel()
    inner = x.numel() // rows
    block = power_above(inner)
    warps = warps_of(block)
    launch(_std, (rows,), (x, out, means), float(eps), float(divisor), inner, block, warps=warps)
    return out, means


def std_slope(
    grad: Tensor, x: Tensor, std: Tensor, means: Tensor, eps: float, divisor: int
) -> Tensor:
    """Returns the gradient of ``std``."""
    result = torch.empty_like(x)
    rows = std.numel()
    inner = x.numel() // rows
    block = power_above(inner)
    tensors, warps = (grad, x, std, means, result), warps_of(block)
    launch(_std_slope, (rows,), tensors, float(eps), float(divisor), inner, block, warps=warps)
    return result


@triton.jit
def _bounded(scale, bound, BOUND: tl.constexpr):
    if BOUND:
        capped = tl.minimum(tl.maximum(scale, -bound), bound)
        scale = capped + scale * 0  # NaN and Inf have to stay visible
    return scale


@triton.jit
def _modulate(
    x, shift, scale, out, largest, bound, tokens, width, apart,
    BOUND: tl.constexpr, WATCH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    sample = row // tokens
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < width
        asked = tl.load(scale + sample * apart + at, inside, 0.0).to(tl.float32)
        if WATCH:
            if row % tokens == 0:
                # Patterns of numbers that are not negative are in the order of the numbers, and
                # NaN is above all.
                highest = tl.max(tl.abs(asked).to(tl.int32, bitcast=True), 0)
                tl.atomic_max(largest, highest)
        factor = (1 + _bounded(asked, bound, BOUND)).to(x.dtype.element_ty).to(tl.float32)
        value = tl.load(x + row * width + at, inside, 0.0).to(tl.float32) * factor
        value += tl.load(shift + sample * apart + at, inside, 0.0).to(tl.float32)
        tl.store(out + row * width + at, value.to(out.dtype.element_ty), inside)


@triton.jit
def _modulate_slope(
    grad, x, scale, to_x, to_shift, to_scale, bound, tokens, width, apart,
    BOUND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    asked = tl.load(scale + sample * apart + at, inside, 0.0).to(tl.float32)
    factor = (1 + _bounded(asked, bound, BOUND)).to(x.dtype.element_ty).to(tl.float32)
    shifts = tl.zeros((ROWS, BLOCK), tl.float32)
    scales = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, tokens, ROWS):
        token = start + tl.arange(0, ROWS)
        here = (token < tokens)[:, None] & inside[None, :]
        place = (sample * tokens + token)[:, None] * width + at[None, :]
        slope = tl.load(grad + place, here, 0.0).to(tl.float32)
        value = tl.load(x + place, here, 0.0).to(tl.float32)
        shifts += slope
        scales += slope * value
        tl.store(to_x + place, (slope * factor[None, :]).to(to_x.dtype.element_ty), here)
    whole = tl.sum(scales, 0)
    if BOUND:
        # As torch has it: no gradient at and beyond the bound.
        whole = tl.where((asked <= -bound) | (asked >= bound), 0.0, whole)
    place = sample * width + at
    tl.store(to_shift + place, tl.sum(shifts, 0).to(to_shift.dtype.element_ty), inside)
    tl.store(to_scale + place, whole.to(to_scale.dtype.element_ty), inside)


def modulate(
    x: Tensor, shift: Tensor, scale: Tensor, bound: float | None, largest: Tensor | None
) -> Tensor:
    """Returns ``x * (1 + scale) + shift``, and notes the largest scale that was asked for.

    Args:
        x: Of shape (batch, ..., width).
        shift: Of shape (batch, width), rows as far apart as those of the scale.
        scale: The same.
        bound: The bound on the scale; None for none.
        largest: A float32 scalar, raised where the scale is larger; None if nobody asks.
    """
    out = torch.empty_like(x)
    batch, width = scale.shape
    rows = x.numel() // width
    block = min(power_above(width), 4096)
    noted = None if largest is None else largest.view(torch.int32)
    launch(
        _modulate, (rows,), (x, shift, scale, out, noted), float(bound or 0), rows // batch, width,
        scale.stride(0), bound is not None, largest is not None, block, warps=warps_of(block),
    )  # fmt: skip
    return out


def modulate_slope(
    grad: Tensor, x: Tensor, scale: Tensor, bound: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of ``modulate`` to the input, the shift and the scale."""
    batch, width = scale.shape
    to_x = torch.empty_like(x)
    to_shift, to_scale = (scale.new_empty(scale.shape) for _ in range(2))
    tokens = x.numel() // width // batch
    rows, block = 32, 64
    launch(
        _modulate_slope, (-(-width // block), batch),
        (grad, x, scale, to_x, to_shift, to_scale), float(bound or 0), tokens, width,
        scale.stride(0), bound is not None, rows, block,
    )  # fmt: skip
    return to_x, to_shift, to_scale
