"""Kernels that go from element to element, and how any kernel is launched."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, misc"
# Triton reads the functions marked jit, and its constants are capitals.
# ruff: noqa: ANN001, ANN202, N803, FBT001

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 1024  # elements that one program takes at a time, where rows play no part
LONGEST_BLOCK = 8192  # elements of a row that are held at once
# The version of Triton whose compiled kernels were tried; others are called in the usual way.
DIRECT = triton.__version__.startswith("3.6.")
MOST_COMPILED = 4096  # shapes that are remembered before all are forgotten
_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    jitted: Any, grid: tuple[int, ...], tensors: tuple[Any, ...], *rest: Any, warps: int = 4
) -> None:
    """Runs a kernel.

    Triton looks at all arguments anew for each call, which takes longer than a small kernel runs.
    What it compiled for the same types, sizes and numbers is called as it is.

    Args:
        jitted: The kernel.
        grid: How many programs.
        tensors: Its first arguments, each a tensor or None.
        rest: The others.
        warps: How many warps a program has.
    """
    device = tensors[0].get_device()
    places: list[int | None] = []
    types: list[torch.dtype | None] = []
    bits = 0
    for x in tensors:
        place = dtype = None
        if x is not None:
            place, dtype = x.data_ptr(), x.dtype
            bits |= place
        places.append(place)
        types.append(dtype)
    key = (id(jitted), device, warps, rest, *types)
    # Kernels are compiled for tensors that begin where those of the allocator do.
    aligned = not bits % 16
    found = _compiled.get(key) if aligned else None
    if found is not None:
        start, settings = found
        stream = torch._C._cuda_getCurrentRawStream(device)
        start(grid[0], grid[1] if len(grid) > 1 else 1, 1, stream, *settings, *places, *rest)
        return
    compiled = jitted[grid](*tensors, *rest, num_warps=warps)
    if DIRECT and aligned and (direct := _direct(compiled)) is not None:
        if len(_compiled) >= MOST_COMPILED:
            _compiled.clear()
        _compiled[key] = direct


def _direct(compiled: Any) -> tuple[Any, tuple[Any, ...]] | None:
    """Returns what starts a compiled kernel, and its arguments between the stream and ours."""
    launcher = getattr(compiled, "run", None)
    if launcher is None or launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    kinds = (launcher.launch_cooperative_grid, launcher.launch_pdl)
    nothing = None, None, compiled.packed_metadata, None, None, None
    return launcher.launch, (compiled.function, *kinds, *nothing)


def blocks(n: int) -> int:
    """Returns how many blocks there are of elements that are no rows."""
    return -(-n // BLOCK)


def stride_of(allowed: Tensor, logits: Tensor) -> int:
    """Returns how far apart the rows of a mask of classes are: 0 if all samples share one."""
    return 0 if allowed.numel() == logits.shape[-1] else logits.shape[-1]


def power_above(length: int) -> int:
    """Returns the next power of 2."""
    return 1 << max(length - 1, 0).bit_length()


def block_of(length: int) -> int:
    """Returns how many elements of a row are taken at a time."""
    return min(power_above(length), LONGEST_BLOCK)


def warps_of(block: int) -> int:
    """Returns how many warps share a block."""
    return min(max(block // 512, 4), 16)


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


@triton.jit
def _soft_cap(x, out, limit, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, at < n).to(tl.float32)
    capped = libdevice.tanh(tl.div_rn(value, limit)) * limit
    capped = capped + value * 0  # Inf has to stay visible
    tl.store(out + at, capped.to(out.dtype.element_ty), at < n)


@triton.jit
def _soft_cap_slope(grad, out, result, limit, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    share = tl.div_rn(tl.load(out + at, at < n).to(tl.float32), limit)
    slope = tl.load(grad + at, at < n).to(tl.float32) * (1 - share * share)
    tl.store(result + at, slope.to(result.dtype.element_ty), at < n)


def soft_cap(x: Tensor, limit: float) -> Tensor:
    """Returns ``limit * tanh(x / limit)``, NaN where the input is not finite."""
    out = torch.empty_like(x)
    n = x.numel()
    launch(_soft_cap, (blocks(n),), (x, out), float(limit), n, BLOCK)
    return out


def soft_cap_slope(grad: Tensor, out: Tensor, limit: float) -> Tensor:
    """Returns the gradient of ``soft_cap``, from what it returned."""
    result = torch.empty_like(out)
    n = out.numel()
    launch(_soft_cap_slope, (blocks(n),), (grad, out, result), float(limit), n, BLOCK)
    return result


@triton.jit
def _away_from_zero(below, eps):
    size = tl.abs(below)
    size = tl.where(size <= eps, eps, size) + size * 0
    return tl.where(below >= 0, size, -size)


@triton.jit
def _safe_div(above, below, out, eps, n, inner, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    divisor = _away_from_zero(tl.load(below + at // inner, at < n, 1.0).to(tl.float32), eps)
    value = tl.div_rn(tl.load(above + at, at < n, 0.0).to(tl.float32), divisor)
    tl.store(out + at, value.to(out.dtype.element_ty), at < n)


@triton.jit
def _safe_div_slope(grad, below, out, to_above, to_below, eps, inner, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    bare = tl.load(below + row).to(tl.float32)
    divisor = _away_from_zero(bare, eps)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, inner, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < inner
        slope = tl.load(grad + row * inner + at, inside, 0.0).to(tl.float32)
        slope = tl.div_rn(slope, divisor)
        value = tl.load(out + row * inner + at, inside, 0.0).to(tl.float32)
        total += tl.where(inside, slope * value, 0.0)
        tl.store(to_above + row * inner + at, slope.to(to_above.dtype.element_ty), inside)
    whole = tl.where(tl.abs(bare) <= eps, 0.0, -tl.sum(total, 0))
    tl.store(to_below + row, whole.to(to_below.dtype.element_ty))


@triton.jit
def _safe_div_slope_alike(grad, below, out, to_above, to_below, eps, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    bare = tl.load(below + at, inside, 1.0).to(tl.float32)
    slope = tl.load(grad + at, inside, 0.0).to(tl.float32)
    slope = tl.div_rn(slope, _away_from_zero(bare, eps))
    value = tl.load(out + at, inside, 0.0).to(tl.float32)
    whole = tl.where(tl.abs(bare) <= eps, 0.0, -slope * value)
    tl.store(to_above + at, slope.to(to_above.dtype.element_ty), inside)
    tl.store(to_below + at, whole.to(to_below.dtype.element_ty), inside)


def safe_div(above: Tensor, below: Tensor, eps: float) -> Tensor:
    """Returns a quotient; the divisor has one value for each, or for each row."""
    out = torch.empty_like(above)
    n = above.numel()
    inner = n // below.numel()
    launch(_safe_div, (blocks(n),), (above, below, out), float(eps), n, inner, BLOCK)
    return out


def safe_div_slope(grad: Tensor, below: Tensor, out: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns the gradients of ``safe_div``."""
    to_above, to_below = torch.empty_like(out), torch.empty_like(below)
    n, rows = out.numel(), below.numel()
    tensors = (grad, below, out, to_above, to_below)
    if n == rows:
        launch(_safe_div_slope_alike, (blocks(n),), tensors, float(eps), n, BLOCK)
    else:
        inner = n // rows
        launch(_safe_div_slope, (rows,), tensors, float(eps), inner, block_of(inner))
    return to_above, to_below


@triton.jit
def _shares(step, alphas, steps, sample):
    number = tl.load(step + sample)
    inside = (number >= 0) & (number < steps)
    alpha = tl.load(alphas + tl.where(inside, number, 0)).to(tl.float32)
    alpha = tl.where(inside, alpha, float("nan"))
    return tl.sqrt_rn(alpha), tl.sqrt_rn(1 - alpha)


@triton.jit
def _add_noise(x, noise, step, alphas, out, steps, inner, BLOCK: tl.constexpr):
    sample = tl.program_id(1).to(tl.int64)
    signal, rest = _shares(step, alphas, steps, sample)
    signal = signal.to(x.dtype.element_ty).to(tl.float32)
    rest = rest.to(x.dtype.element_ty).to(tl.float32)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + sample * inner + at, at < inner, 0.0).to(tl.float32) * signal
    value += tl.load(noise + sample * inner + at, at < inner, 0.0).to(tl.float32) * rest
    tl.store(out + sample * inner + at, value.to(out.dtype.element_ty), at < inner)


@triton.jit
def _add_noise_slope(
    grad, step, alphas, result, steps, inner, NOISE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    sample = tl.program_id(1).to(tl.int64)
    share, rest = _shares(step, alphas, steps, sample)
    if NOISE:
        share = rest
    share = share.to(result.dtype.element_ty).to(tl.float32)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slope = tl.load(grad + sample * inner + at, at < inner, 0.0).to(tl.float32) * share
    tl.store(result + sample * inner + at, slope.to(result.dtype.element_ty), at < inner)


def add_noise(x: Tensor, noise: Tensor, step: Tensor, alphas: Tensor) -> Tensor:
    """Returns samples with noise; NaN for a step that is not in the table."""
    out = torch.empty_like(x)
    batch = step.numel()
    inner = x.numel() // batch
    grid = (blocks(inner), batch)
    launch(_add_noise, grid, (x, noise, step, alphas, out), alphas.numel(), inner, BLOCK)
    return out


def add_noise_slope(grad: Tensor, step: Tensor, alphas: Tensor, to_noise: bool) -> Tensor:
    """Returns the gradient of ``add_noise`` to the samples, or to the noise."""
    result = torch.empty_like(grad)
    batch = step.numel()
    inner = grad.numel() // batch
    grid = (blocks(inner), batch)
    tensors = (grad, step, alphas, result)
    launch(_add_noise_slope, grid, tensors, alphas.numel(), inner, to_noise, BLOCK)
    return result


@triton.jit
def _chosen(x, mask, out, n, period, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keep = tl.load(mask + at % period, at < n, 0) != 0
    value = tl.load(x + at, at < n, 0.0)
    tl.store(out + at, tl.where(keep, value, 0.0), at < n)


def chosen(x: Tensor, mask: Tensor) -> Tensor:
    """Returns values where a mask is true and 0 elsewhere; the mask may be that of one row."""
    out = torch.empty_like(x)
    n = x.numel()
    launch(_chosen, (blocks(n),), (x, mask, out), n, mask.numel(), BLOCK)
    return out


@triton.jit
def _time_weight(t, out, edge, eps, n, EARLY: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(t + at, at < n, 0.5).to(tl.float32)
    if not EARLY:
        value = 1 - value
    value = tl.where(value <= edge, edge, value) + value * 0  # Inf has to stay visible
    if EARLY:
        weight = tl.div_rn(value + 1, tl.sqrt_rn(value))
    else:
        weight = tl.sqrt_rn(tl.div_rn(value + 1, value + eps))
    tl.store(out + at, weight.to(out.dtype.element_ty), at < n)


def time_weight(t: Tensor, edge: float, eps: float, early: bool) -> Tensor:
    """Returns the loss weights of diffusion times, early or late ones.

    Args:
        t: The times.
        edge: The least time, or the least rest of the time, that counts as it is.
        eps: What is added to the rest of the time.
        early: Which of the two weights.
    """
    out = torch.empty_like(t)
    n = t.numel()
    launch(_time_weight, (blocks(n),), (t, out), float(edge), float(eps), n, early, BLOCK)
    return out
