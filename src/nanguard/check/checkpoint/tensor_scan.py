"""The numbers of many tensors: read once, in blocks that fit the cache, and summed up.

The common case is decided by whole-number maxima over bit patterns, at the speed of memory: read as
signed numbers the largest pattern is the largest positive value, read as unsigned ones the largest
negative value, and every pattern that is not finite lies above all that are. Only blocks in which
something stands out are looked at as floats.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanguard.check.checkpoint.byte_ranges import Blob, DamagedError, read_fully
from nanguard.check.checkpoint.tensors import Dtype, StorageRegion, byte_values, slabs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from nanguard.check.checkpoint.tensors import Storage, StoredTensor
    from nanguard.check.scan import Progress

HALF_MAX = 65504.0
_BEYOND_HALF = {"float32": 0x477FE000, "complex64": 0x477FE000, "bfloat16": 0x477F}


@dataclass(slots=True)
class TensorNumbers:
    """The numbers of a tensor, or of a part of one.

    Attributes:
        count: How many there are.
        nan: How many are NaN.
        above: How many are plus infinity.
        below: How many are minus infinity.
        first: The index of the first that is not finite, counted in the order of the storage.
        low: The smallest finite one.
        high: The largest finite one.
        beyond: How many finite ones fp16 cannot hold.
        inner: The smallest and the largest of those that fp16 can hold.
        outer: The smallest and the largest of those that it cannot.
    """

    count: int = 0
    nan: int = 0
    above: int = 0
    below: int = 0
    first: int | None = None
    low: float = float("inf")
    high: float = float("-inf")
    beyond: int = 0
    inner: tuple[float, float] = (float("inf"), float("-inf"))
    outer: tuple[float, float] = (float("inf"), float("-inf"))

    @property
    def nonfinite(self) -> int:
        """How many are not finite."""
        return self.nan + self.above + self.below

    @property
    def largest(self) -> float:
        """The largest magnitude of a finite one."""
        return max(abs(self.low), abs(self.high)) if self.low <= self.high else 0.0

    def add(self, other: TensorNumbers) -> None:
        """Takes in the numbers that come behind these."""
        if self.first is None and other.first is not None:
            self.first = self.count + other.first
        for name in ("count", "nan", "above", "below", "beyond"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.inner = _hull(self.inner, other.inner)
        self.outer = _hull(self.outer, other.outer)


def _hull(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    return min(one[0], other[0]), max(one[1], other[1])


class Tally:
    """Takes in the numbers of a tensor block by block."""

    def __init__(self, dtype: Dtype) -> None:
        import numpy as np

        self._dtype = dtype
        self._total = TensorNumbers()
        self._plain = dtype.floats in (8, 16, 32) and dtype.special in ("ieee", "fn")
        self._reduce = np.maximum.reduce
        self._types = (np.dtype(f"i{dtype.floats // 8}"), np.dtype(f"u{dtype.floats // 8}"))
        self._sign = 1 << (dtype.floats - 1)
        full = (1 << dtype.exponent) - 1
        limit = (full << dtype.mantissa) - 1 if dtype.special == "ieee" else self._sign - 2
        self._limit = min(limit, _BEYOND_HALF.get(dtype.name, limit))
        # The largest pattern of a positive and of a negative number, and the smallest of all.
        self._positive = self._negative = -1
        self._least = 1 << dtype.floats

    def take(self, raw: NDArray[Any]) -> None:
        """Takes in a block.

        Args:
            raw: Its bytes, with the smallest byte of a number first.
        """
        if not raw.size:
            return
        if not self._plain:
            found = _doubles(raw, self._dtype) if self._dtype.floats == 64 else None
            self._total.add(found or _detailed(_floats(raw, self._dtype), self._dtype))
            return
        signed, unsigned = raw.view(self._types[0]), raw.view(self._types[1])
        positive, negative = int(self._reduce(signed)), int(self._reduce(unsigned)) - self._sign
        if positive > self._limit or negative > self._limit:
            self._total.add(_detailed(_floats(raw, self._dtype), self._dtype))
            return
        self._total.count += signed.size
        if positive > self._positive:
            self._positive = positive
        if negative > self._negative:
            self._negative = negative
        if positive < 0 or negative < 0:
            self._least = min(self._least, int(unsigned.min()))

    def numbers(self) -> TensorNumbers:
        """Returns what all of them are."""
        if self._positive >= 0 or self._negative >= 0:
            low = self._sign + self._negative if self._negative >= 0 else self._least
            high = self._positive if self._positive >= 0 else self._least
            ends = (_value(low, self._dtype), _value(high, self._dtype))
            self._total.add(TensorNumbers(0, low=ends[0], high=ends[1], inner=ends))
        self._positive = self._negative = -1
        return self._total


def _doubles(raw: NDArray[Any], dtype: Dtype) -> TensorNumbers:
    import numpy as np

    values = raw.view("f8")
    with np.errstate(invalid="ignore"):
        low, high = float(values.min()), float(values.max())
    if low >= -HALF_MAX and high <= HALF_MAX:
        return TensorNumbers(values.size, low=low, high=high, inner=(low, high))
    return _detailed(values, dtype)


def _value(pattern: int, dtype: Dtype) -> float:
    import numpy as np

    raw = np.frombuffer(pattern.to_bytes(dtype.floats // 8, "little"), np.uint8)
    return float(_floats(raw, dtype)[0])


def _floats(raw: NDArray[Any], dtype: Dtype) -> NDArray[Any]:
    """Returns the values as floats that numpy knows."""
    if dtype.floats == 8:
        table: NDArray[Any] = byte_values(dtype)[raw]
        return table
    if dtype.floats == 16 and dtype.exponent == 8:
        return (raw.view("u2").astype("u4") << 16).view("f4")
    return raw.view(f"f{dtype.floats // 8}")


def _detailed(values: NDArray[Any], dtype: Dtype) -> TensorNumbers:
    import numpy as np

    found = TensorNumbers(values.size)
    finite = np.isfinite(values)
    good = int(finite.sum())
    if good < values.size:
        found.first = int(finite.argmin())
        found.above = int((values == np.inf).sum())
        found.below = int((values == -np.inf).sum())
        found.nan = values.size - good - found.above - found.below
        values = values[finite]
    if not good:
        return found
    found.low, found.high = float(values.min()), float(values.max())
    found.inner = (found.low, found.high)
    if dtype.wide and found.largest > HALF_MAX:
        outside = np.abs(values) > HALF_MAX
        outer, inner = values[outside], values[~outside]
        found.beyond = int(outer.size)
        found.outer = (float(outer.min()), float(outer.max()))
        found.inner = (
            (float(inner.min()), float(inner.max())) if inner.size else TensorNumbers().inner
        )
    return found


# A block stays in the cache between being read and being looked at; smaller ones cost threads more
# time waiting for each other than they gain.
BLOCK_BYTES = 1 << 21
# What one thread takes on at a time.
PORTION = 1 << 25
# Views that look at the same numbers more often than this, or at the same stretch more often than
# that, are looked at together.
OVERLAP = 2
STRETCHES = 16


@dataclass(frozen=True, slots=True)
class _Piece:
    """Elements to read for one view."""

    view: int
    storage: Storage
    dtype: Dtype
    region: StorageRegion


def measure_all(
    tensors: Sequence[StoredTensor], *, threads: int, progress: Progress
) -> list[TensorNumbers]:
    """Returns what the numbers of each tensor are.

    Views of the same elements are read once. Whole numbers are not read: all of them are finite.

    Args:
        tensors: The tensors.
        threads: How many threads may read.
        progress: Called with the file and the bytes read.

    Raises:
        DamagedError: A file ended while it was read.
    """
    views: dict[tuple[object, ...], int] = {}
    which: list[int] = []
    pieces: list[_Piece] = []
    for tensor, region in zip(tensors, _regions(tensors), strict=True):
        key = (id(tensor.storage.blob), tensor.storage.offset, tensor.dtype.name, region)
        if key not in views:
            views[key] = len(views)
            if tensor.dtype.floats:
                pieces += _split(views[key], tensor.storage, tensor.dtype, region)
        which.append(views[key])
    merged = [TensorNumbers() for _ in views]
    work = _Work(progress)
    if threads <= 1 or sum(piece.region.extent for piece in pieces) < PORTION:
        for part in _portions(pieces):
            work.collect(merged, work.run(part))
    else:
        with ThreadPoolExecutor(threads, thread_name_prefix="nanguard-scan") as pool:
            for found in pool.map(work.run, _portions(pieces)):
                work.collect(merged, found)
    return [merged[view] for view in which]


def _regions(tensors: Sequence[StoredTensor]) -> Iterator[StorageRegion]:
    """Yields the region to read for each tensor.

    Where a file makes many views of one storage, so that reading each of them would cost far more
    than the storage is long, all of them get what they cover together.
    """
    covers: dict[tuple[int, int, str], set[StorageRegion]] = {}
    for tensor in tensors:
        covers.setdefault(_place(tensor), set()).add(tensor.region)
    shared = {place: _shared(regions) for place, regions in covers.items()}
    for tensor in tensors:
        yield shared[_place(tensor)] or tensor.region


def _place(tensor: StoredTensor) -> tuple[int, int, str]:
    return id(tensor.storage.blob), tensor.storage.offset, tensor.dtype.name


def _shared(regions: set[StorageRegion]) -> StorageRegion | None:
    start = min(region.start for region in regions)
    end = max(region.start + region.extent for region in regions)
    span = end - start
    numbers = sum(region.count for region in regions) <= OVERLAP * span
    if numbers and sum(region.extent for region in regions) <= STRETCHES * span:
        return None
    return StorageRegion(start, span)


def _split(view: int, storage: Storage, dtype: Dtype, region: StorageRegion) -> Iterator[_Piece]:
    size = dtype.bits // 8
    if region.shape:
        for slab in slabs(region, size):
            yield _Piece(view, storage, dtype, slab)
        return
    step = PORTION // size
    for start in range(0, region.extent, step):
        part = StorageRegion(region.start + start, min(step, region.extent - start))
        yield _Piece(view, storage, dtype, part)


def _portions(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    """Yields pieces together that are worth a thread's while."""
    portion: list[_Piece] = []
    size = 0
    for piece in pieces:
        portion.append(piece)
        size += piece.region.extent * piece.dtype.bits // 8 + 4096
        if size >= PORTION:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion


class _Work:
    """What one thread does; each has a buffer of its own."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._own = threading.local()

    def run(self, pieces: list[_Piece]) -> list[tuple[int, TensorNumbers]]:
        """Returns the numbers of some pieces, each with its view."""
        return [(piece.view, self._piece(piece)) for piece in pieces]

    @staticmethod
    def collect(merged: list[TensorNumbers], found: list[tuple[int, TensorNumbers]]) -> None:
        """Adds what was found in pieces, which come in order."""
        for view, numbers in found:
            merged[view].add(numbers)

    def _piece(self, piece: _Piece) -> TensorNumbers:
        size, storage, region = piece.dtype.bits // 8, piece.storage, piece.region
        begin = storage.offset + region.start * size
        tally = Tally(piece.dtype)
        if region.shape:
            raw = self._read(storage.blob, begin, region.extent * size)
            tally.take(_ordered(_picked(raw, region, size), piece))
        else:
            end = region.extent * size
            for at in range(0, end, BLOCK_BYTES):
                raw = self._read(storage.blob, begin + at, min(BLOCK_BYTES, end - at))
                tally.take(_ordered(raw, piece))
        self._progress(storage.blob.path, region.extent * size)
        return tally.numbers()

    def _read(self, blob: Blob, offset: int, size: int) -> NDArray[Any]:
        import numpy as np

        buffer = getattr(self._own, "buffer", None)
        if buffer is None or buffer.size < size:
            buffer = self._own.buffer = np.empty(max(size, BLOCK_BYTES), np.uint8)
        part: NDArray[Any] = buffer[:size]
        got = blob.read_into(offset, part.data)
        if got < size:
            got += read_fully(blob, offset + got, part[got:].data)
        if got < size:
            raise DamagedError(f"the file ended at byte {offset + got:,} while it was read")
        return part


def _picked(raw: NDArray[Any], region: StorageRegion, size: int) -> NDArray[Any]:
    """Returns the bytes of the elements that are meant, without those between them."""
    import numpy as np

    view = np.lib.stride_tricks.as_strided(
        raw, (*region.shape, size), (*(stride * size for stride in region.strides), 1)
    )
    return np.ascontiguousarray(view).reshape(-1)


def _ordered(raw: NDArray[Any], piece: _Piece) -> NDArray[Any]:
    if not piece.storage.swapped or piece.dtype.floats == 8:
        return raw
    import numpy as np

    turned: NDArray[Any] = raw.view(f"u{piece.dtype.floats // 8}").byteswap().view(np.uint8)
    return turned
