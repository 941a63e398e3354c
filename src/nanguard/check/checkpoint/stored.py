"""Tensors as they lie in a file: a type, a shape, and the part of a storage they look at."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanguard.check.checkpoint.inert import DamagedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.checkpoint.blob import Blob
    from nanguard.check.checkpoint.dtypes import Dtype

MAX_DIMENSIONS = 64

# Views with gaps are read in slabs of this many bytes.
SLAB = 1 << 25


@dataclass(frozen=True, slots=True)
class Storage:
    """Bytes that one tensor or several look at.

    Attributes:
        blob: Where they are.
        offset: Where they begin there.
        nbytes: How many there are.
        swapped: Whether numbers are stored with their largest byte first.
    """

    blob: Blob
    offset: int
    nbytes: int
    swapped: bool = False


@dataclass(frozen=True, slots=True)
class Region:
    """Elements of a storage: all between two places, or those at regular distances.

    Attributes:
        start: The first element.
        extent: How many elements there are from the first to the last.
        shape: How many in each direction; none if all are meant.
        strides: How far apart in each direction.
    """

    start: int
    extent: int
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """How many elements are meant."""
        return math.prod(self.shape) if self.shape else self.extent


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint.

    Attributes:
        keys: Where it is in the tree of the file, from the root on.
        dtype: The type of its numbers.
        shape: Its shape.
        storage: Where its numbers are.
        region: Which of them.
        scale: What quantised numbers are multiplied by; None for others.
    """

    keys: tuple[str, ...]
    dtype: Dtype
    shape: tuple[int, ...]
    storage: Storage
    region: Region
    scale: float | None = None

    @property
    def name(self) -> str:
        """The keys as one name."""
        return ".".join(self.keys)


def region_of(
    start: int, shape: tuple[int, ...], strides: tuple[int, ...] | None, room: int
) -> Region:
    """Returns the elements a view looks at.

    Args:
        start: Its first element.
        shape: Its shape.
        strides: Its strides; None for a view without gaps.
        room: How many elements the storage has.

    Raises:
        DamagedError: It looks at elements that the storage does not have.
    """
    if len(shape) > MAX_DIMENSIONS or min(shape, default=0) < 0 or start < 0:
        raise DamagedError(f"a tensor has the shape {list(shape[:8])} at {start}")
    if 0 in shape:
        return Region(start, 0)
    if strides is None:
        strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    if len(strides) != len(shape) or min(strides, default=0) < 0:
        raise DamagedError(f"a tensor has the strides {list(strides[:8])}")
    dims = sorted((s, n) for s, n in zip(strides, shape, strict=True) if n > 1 and s > 0)
    extent = 1 + sum(s * (n - 1) for s, n in dims)
    if start + extent > room:
        raise DamagedError(
            f"a tensor of shape {list(shape[:8])} ends at element {start + extent:,} of a storage"
            f" that has {room:,}"
        )
    count = math.prod(n for _, n in dims)
    if count >= extent:  # no gaps; or windows that overlap, which together have none
        return Region(start, extent)
    dims.reverse()
    return Region(start, extent, tuple(n for _, n in dims), tuple(s for s, _ in dims))


def slabs(region: Region, size: int) -> Iterator[Region]:
    """Yields a region with gaps as regions of few bytes each, in order.

    Args:
        region: The region.
        size: How many bytes an element has.
    """
    todo = [region]
    while todo:
        one = todo.pop()
        if one.extent * size <= SLAB or not one.shape:
            yield one
            continue
        stride, inner = one.strides[0], one.extent - one.strides[0] * (one.shape[0] - 1)
        step = max(1, (SLAB // size - inner) // stride + 1)
        parts = []
        for first in range(0, one.shape[0], step):
            many = min(step, one.shape[0] - first)
            start, extent = one.start + first * stride, inner + stride * (many - 1)
            if many > 1:
                shape, strides = (many, *one.shape[1:]), one.strides
            else:
                shape, strides = one.shape[1:], one.strides[1:]
            parts.append(Region(start, extent, shape, strides))
        todo.extend(reversed(parts))
