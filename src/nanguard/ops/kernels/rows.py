"""Kernels that go from row to row: norms, deviations, and the modulation of AdaLN."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, misc"
# Triton reads the functions marked jit, and its constants are capitals.
# ruff: noqa: ANN001, ANN202, N803, SIM102

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nanguard.ops.kernels.launching import block_of, launch, power_above, warps_of

if TYPE_CHECKING:
    from torch import Tensor


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


def norm(x: Tensor, rows: int, eps: float) -> Tensor:
    """Returns the norm of each row, in float32, at least ``eps``."""
    out = torch.empty(rows, dtype=torch.float32, device=x.device)
    inner = x.numel() // rows
    launch(_norm, (rows,), (x, out), eps, inner, block_of(inner))
    return out


def norm_slope(grad: Tensor, x: Tensor, norm: Tensor, eps: float) -> Tensor:
    """Returns the gradient of ``norm``."""
    result = torch.empty_like(x)
    inner = x.numel() // norm.numel()
    launch(_norm_slope, (norm.numel(),), (grad, x, norm, result), eps, inner, block_of(inner))
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


def std(x: Tensor, rows: int, eps: float, divisor: int) -> tuple[Tensor, Tensor]:
    """Returns the deviation of each row, at least ``eps``, and its mean."""
    out = torch.empty(rows, dtype=x.dtype, device=x.device)
    means = torch.empty(rows, dtype=torch.float32, device=x.device)
    inner = x.numel() // rows
    block = power_above(inner)
    warps = warps_of(block)
    launch(_std, (rows,), (x, out, means), eps, float(divisor), inner, block, warps=warps)
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
    launch(_std_slope, (rows,), tensors, eps, float(divisor), inner, block, warps=warps)
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
        _modulate, (rows,), (x, shift, scale, out, noted), bound or 0.0, rows // batch, width,
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
        (grad, x, scale, to_x, to_shift, to_scale), bound or 0.0, tokens, width, scale.stride(0),
        bound is not None, rows, block,
    )  # fmt: skip
    return to_x, to_shift, to_scale
