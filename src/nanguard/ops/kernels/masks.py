"""Kernels around attention: masks whose rows keep nothing, and what comes of those rows."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, misc"
# Triton reads the functions marked jit, and its constants are capitals.
# ruff: noqa: ANN001, ANN202, N803, FBT001

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nanguard.ops.kernels.launching import block_of, launch, power_above, warps_of

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def _open_rows(mask, bias, keeps, keys, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    some = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, keys, BLOCK):
        at = start + tl.arange(0, BLOCK)
        some |= tl.load(mask + row * keys + at, at < keys, 0).to(tl.int32)
    none = tl.max(some, 0) == 0
    for start in range(0, keys, BLOCK):
        at = start + tl.arange(0, BLOCK)
        keep = (tl.load(mask + row * keys + at, at < keys, 0) != 0) | none
        value = tl.where(keep, 0.0, float("-inf"))
        tl.store(bias + row * keys + at, value.to(bias.dtype.element_ty), at < keys)
    tl.store(keeps + row, none == 0)


def open_rows(mask: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns a boolean mask as one that is added, rows that keep nothing open; and which keep."""
    bias = torch.empty(mask.shape, dtype=dtype, device=mask.device)
    keeps = torch.empty((*mask.shape[:-1], 1), dtype=torch.bool, device=mask.device)
    keys = mask.shape[-1]
    block = block_of(keys)
    tensors = (mask, bias, keeps)
    launch(_open_rows, (keeps.numel(),), tensors, keys, block, warps=warps_of(block))
    return bias, keeps


@triton.jit
def _zero_rows(
    x, out, keeps, heads, queries, width, x0, x1, x2, o0, o1, o2, k0, k1, k2,
    COPY: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Rows of a tensor of (batch, heads, queries, width), by strides; the width lies together.
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1)
    batch, head = (group // heads).to(tl.int64), (group % heads).to(tl.int64)
    there = number < queries
    far = number.to(tl.int64)
    keep = tl.load(keeps + batch * k0 + head * k1 + far * k2, there, 1) != 0
    at = tl.arange(0, BLOCK)
    inside = there[:, None] & (at < width)[None, :]
    place = out + batch * o0 + head * o1 + far[:, None] * o2 + at[None, :]
    if COPY:
        value = tl.load(x + batch * x0 + head * x1 + far[:, None] * x2 + at[None, :], inside)
        tl.store(place, tl.where(keep[:, None], value, 0.0), inside)
    else:
        nothing = tl.zeros((ROWS, BLOCK), out.dtype.element_ty)
        tl.store(place, nothing, inside & (keep == 0)[:, None])


def zero_rows(x: Tensor, keeps: Tensor, copy: bool) -> Tensor:
    """Sets rows to 0 that keep nothing: in a copy, or where they are, which touches only them.

    Args:
        x: Of shape (batch, heads, queries, width), the width with stride 1.
        keeps: Which rows keep something, of shape (batch, heads, queries, 1) or broadcast to it.
        copy: Whether to leave the values as they are and return new ones.
    """
    out = torch.empty_like(x) if copy else x
    batch, heads, queries, width = x.shape
    flags = keeps.expand(batch, heads, queries, 1)
    rows = 32
    grid = (triton.cdiv(queries, rows), batch * heads)
    strides = (*x.stride()[:3], *out.stride()[:3], *flags.stride()[:3])
    block = power_above(width)
    launch(_zero_rows, grid, (x, out, flags), heads, queries, width, *strides, copy, rows, block)
    return out
