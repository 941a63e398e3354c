"""Reading tensors: views, gaps, parts of one storage, files that end."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest

from nanguard.check.checkpoint import tensor_scan
from nanguard.check.checkpoint import tensors as tensors_module
from nanguard.check.checkpoint.byte_ranges import DamagedError, FileBlob, MemoryBlob, Window, read
from nanguard.check.checkpoint.tensor_scan import measure_all
from nanguard.check.checkpoint.tensors import (
    DTYPES,
    Storage,
    StorageRegion,
    StoredTensor,
    region_of,
    slabs,
)

if TYPE_CHECKING:
    from pathlib import Path

F32 = DTYPES["float32"]


class Counting(MemoryBlob):
    read_bytes = 0

    def read_into(self, offset: int, buffer: memoryview) -> int:
        got = super().read_into(offset, buffer)
        self.read_bytes += got
        return got


def tensors(values: np.ndarray, *views: tuple) -> tuple[Counting, list[StoredTensor]]:
    blob = Counting("m", values.tobytes())
    storage = Storage(blob, 0, blob.size)
    room = values.size
    return blob, [
        StoredTensor((str(n),), F32, shape, storage, region_of(start, shape, strides, room))
        for n, (start, shape, strides) in enumerate(views)
    ]


def scan(made: list[StoredTensor], threads: int = 2) -> list:
    return measure_all(made, threads=threads, progress=lambda path, read: None)


def test_views_with_gaps_see_only_their_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tensors_module, "SLAB", 256)
    values = np.zeros((20, 30, 10), "f4")
    values[7, 11, 3] = np.nan
    values[:, :, 5] = np.inf
    _blob, made = tensors(
        values,
        (3, (20, 30), (300, 10)),
        (4, (20, 30), (300, 10)),
        (0, (20, 30, 5), (300, 10, 1)),
        (6, (4, 20, 30), (1, 300, 10)),
    )
    assert [one.nonfinite for one in scan(made)] == [1, 0, 1, 0]
    assert scan(made)[0].first == 7 * 30 + 11


def test_the_same_view_is_read_once():
    blob, made = tensors(
        np.ones(1000, "f4"), *[(0, (10, 100), (100, 1))] * 5, (0, (100, 10), (1, 100))
    )
    assert [one.count for one in scan(made)] == [1000] * 6
    assert blob.read_bytes == 4000


def test_many_overlapping_views_are_read_together():
    values = np.ones(5000, "f4")
    values[4000] = np.nan
    blob, made = tensors(values, *[(n, (4000,), (1,)) for n in range(0, 1000, 10)])
    assert blob.size == 20_000
    found = scan(made)
    assert blob.read_bytes <= 20_000
    assert all(one.nonfinite == 1 for one in found)


def test_windows_and_expanded_tensors_cost_what_the_storage_does():
    blob, made = tensors(np.ones(100, "f4"), (0, (10**6, 100), (0, 1)), (0, (99, 2), (1, 1)))
    scan(made)
    assert blob.read_bytes <= 800


def test_portions_come_together_in_order(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tensor_scan, "PORTION", 4096)
    monkeypatch.setattr(tensor_scan, "BLOCK_BYTES", 1024)
    values = np.arange(100_000, dtype="f4")
    values[[70_001, 90_000]] = np.nan, -np.inf
    _, made = tensors(values, (0, (100_000,), (1,)), (10, (50,), (1,)))
    first, second = scan(made, threads=3)
    assert (first.first, first.nan, first.below, first.count) == (70_001, 1, 1, 100_000)
    assert (first.low, first.high) == (0.0, 99_999.0)
    assert (second.low, second.high) == (10.0, 59.0)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((11,), (1,)), ((2, 6), (6, 1)), ((2,), (10,)), ((-1,), (1,)), ((2,), (-1,))],
)
def test_views_beyond_their_storage_are_damage(shape: tuple, strides: tuple):
    with pytest.raises(DamagedError):
        region_of(0, shape, strides, 10)


def test_slabs_cover_a_region_exactly(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tensors_module, "SLAB", 100)
    region = region_of(2, (7, 5, 3), (40, 6, 2), 1000)
    want = {2 + 40 * a + 6 * b + 2 * c for a in range(7) for b in range(5) for c in range(3)}
    seen: list[int] = []
    for part in slabs(region, 4):
        assert part.extent * 4 <= 100 or not part.shape
        grid = np.indices(part.shape).reshape(len(part.shape), -1) if part.shape else None
        if grid is None:
            seen += range(part.start, part.start + part.extent)
        else:
            seen += (part.start + np.array(part.strides) @ grid).tolist()
    assert sorted(seen) == sorted(want)


def test_numbers_with_the_largest_byte_first():
    blob = MemoryBlob("m", np.array([1.0, math.inf, -70000.0], ">f4").tobytes())
    tensor = StoredTensor(
        ("w",), F32, (3,), Storage(blob, 0, 12, swapped=True), StorageRegion(0, 3)
    )
    (found,) = scan([tensor])
    assert (found.above, found.first, found.low, found.beyond) == (1, 1, -70000.0, 1)


def test_a_file_that_gets_shorter_while_it_is_read(tmp_path: Path):
    path = tmp_path / "m.bin"
    path.write_bytes(bytes(4000))
    with FileBlob(path) as blob:
        tensor = StoredTensor(("w",), F32, (1000,), Storage(blob, 0, 4000), StorageRegion(0, 1000))
        path.write_bytes(bytes(100))
        with pytest.raises(DamagedError, match="ended at byte 100 while it was read"):
            scan([tensor])


def test_windows_end_where_they_should():
    window = Window(MemoryBlob("m", b"0123456789"), 2, 5)
    assert read(window, 3, 10) == b"56"
    assert read(window, 5, 10) == b""
    assert Window(window, 3, 100).size == 2


def test_systems_without_reads_at_offsets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr("os.preadv")
    path = tmp_path / "m.bin"
    path.write_bytes(np.arange(100, dtype="f4").tobytes())
    with FileBlob(path) as blob:
        assert read(blob, 398, 10) == path.read_bytes()[398:]
        tensor = StoredTensor(("w",), F32, (100,), Storage(blob, 0, 400), StorageRegion(0, 100))
        assert scan([tensor])[0].high == 99.0
