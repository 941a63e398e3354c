"""Reading the numbers of many tensors: once, in blocks that fit the cache, by several threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanguard.check.checkpoint.blob import Blob, read_fully
from nanguard.check.checkpoint.inert import DamagedError
from nanguard.check.checkpoint.numbers import Numbers, Tally
from nanguard.check.checkpoint.stored import Region, slabs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from nanguard.check.checkpoint.dtypes import Dtype
    from nanguard.check.checkpoint.stored import Storage, StoredTensor
    from nanguard.check.scanning import Progress

# A block stays in the cache between being read and being looked at; smaller ones cost threads more
# time waiting for each other than they gain.
BLOCK = 1 << 21
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
    region: Region


def measure_all(
    tensors: Sequence[StoredTensor], *, threads: int, progress: Progress
) -> list[Numbers]:
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
    merged = [Numbers() for _ in views]
    work = _Work(progress)
    if threads <= 1 or sum(piece.region.extent for piece in pieces) < PORTION:
        for part in _portions(pieces):
            work.collect(merged, work.run(part))
    else:
        with ThreadPoolExecutor(threads, thread_name_prefix="nanguard-scan") as pool:
            for found in pool.map(work.run, _portions(pieces)):
                work.collect(merged, found)
    return [merged[view] for view in which]


def _regions(tensors: Sequence[StoredTensor]) -> Iterator[Region]:
    """Yields the region to read for each tensor.

    Where a file makes many views of one storage, so that reading each of them would cost far more
    than the storage is long, all of them get what they cover together.
    """
    covers: dict[tuple[int, int, str], set[Region]] = {}
    for tensor in tensors:
        covers.setdefault(_place(tensor), set()).add(tensor.region)
    shared = {place: _shared(regions) for place, regions in covers.items()}
    for tensor in tensors:
        yield shared[_place(tensor)] or tensor.region


def _place(tensor: StoredTensor) -> tuple[int, int, str]:
    return id(tensor.storage.blob), tensor.storage.offset, tensor.dtype.name


def _shared(regions: set[Region]) -> Region | None:
    start = min(region.start for region in regions)
    end = max(region.start + region.extent for region in regions)
    span = end - start
    numbers = sum(region.count for region in regions) <= OVERLAP * span
    if numbers and sum(region.extent for region in regions) <= STRETCHES * span:
        return None
    return Region(start, span)


def _split(view: int, storage: Storage, dtype: Dtype, region: Region) -> Iterator[_Piece]:
    size = dtype.bits // 8
    if region.shape:
        for slab in slabs(region, size):
            yield _Piece(view, storage, dtype, slab)
        return
    step = PORTION // size
    for start in range(0, region.extent, step):
        part = Region(region.start + start, min(step, region.extent - start))
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

    def run(self, pieces: list[_Piece]) -> list[tuple[int, Numbers]]:
        """Returns the numbers of some pieces, each with its view."""
        return [(piece.view, self._piece(piece)) for piece in pieces]

    @staticmethod
    def collect(merged: list[Numbers], found: list[tuple[int, Numbers]]) -> None:
        """Adds what was found in pieces, which come in order."""
        for view, numbers in found:
            merged[view].add(numbers)

    def _piece(self, piece: _Piece) -> Numbers:
        size, storage, region = piece.dtype.bits // 8, piece.storage, piece.region
        begin = storage.offset + region.start * size
        tally = Tally(piece.dtype)
        if region.shape:
            raw = self._read(storage.blob, begin, region.extent * size)
            tally.take(_ordered(_picked(raw, region, size), piece))
        else:
            end = region.extent * size
            for at in range(0, end, BLOCK):
                raw = self._read(storage.blob, begin + at, min(BLOCK, end - at))
                tally.take(_ordered(raw, piece))
        self._progress(storage.blob.path, region.extent * size)
        return tally.numbers()

    def _read(self, blob: Blob, offset: int, size: int) -> NDArray[Any]:
        import numpy as np

        buffer = getattr(self._own, "buffer", None)
        if buffer is None or buffer.size < size:
            buffer = self._own.buffer = np.empty(max(size, BLOCK), np.uint8)
        part: NDArray[Any] = buffer[:size]
        got = blob.read_into(offset, part.data)
        if got < size:
            got += read_fully(blob, offset + got, part[got:].data)
        if got < size:
            raise DamagedError(f"the file ended at byte {offset + got:,} while it was read")
        return part


def _picked(raw: NDArray[Any], region: Region, size: int) -> NDArray[Any]:
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
