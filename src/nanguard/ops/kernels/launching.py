"""Starting kernels: what a call costs the host, and how work is cut into programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton

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
    key = (id(jitted), warps, rest, *[x.dtype if x is not None else None for x in tensors])
    ready = _compiled.get(key)
    if ready is not None and _aligned(tensors):
        stream = torch._C._cuda_getCurrentRawStream(tensors[0].device.index)
        x, y = grid if len(grid) > 1 else (*grid, 1)
        made, function, about = ready
        made(x, y, 1, stream, function, about, None, None, None, *tensors, *rest)
        return
    compiled = jitted[grid](*tensors, *rest, num_warps=warps)
    if DIRECT and hasattr(compiled, "packed_metadata") and _aligned(tensors):
        if len(_compiled) >= MOST_COMPILED:
            _compiled.clear()
        _compiled[key] = compiled.run, compiled.function, compiled.packed_metadata


def _aligned(tensors: tuple[Any, ...]) -> bool:
    """Returns whether all begin where those of the allocator do, for which kernels are compiled."""
    places = 0
    for x in tensors:
        if x is not None:
            places |= x.data_ptr()
    return not places % 16


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
