"""Files in the safetensors format: a JSON header, then the numbers."""

from __future__ import annotations

import json
import math
from typing import Any

from nanguard.sources.checkpoint.blob import Blob, read
from nanguard.sources.checkpoint.dtypes import DTYPES, SAFETENSORS
from nanguard.sources.checkpoint.inert import DamagedError, TooLargeError
from nanguard.sources.checkpoint.stored import MAX_DIMENSIONS, Region, Storage, StoredTensor
from nanguard.sources.checkpoint.tree import Tree

MAX_HEADER = 1 << 25


def read_safetensors(blob: Blob) -> Tree:
    """Returns the tensors of a file.

    Raises:
        DamagedError: The file is not whole.
        TooLargeError: The header is longer than a checkpoint has any need for.
    """
    size, header = _header(blob)
    tree = Tree()
    room = blob.size - size - 8
    claimed = 0
    for name, about in header.items():
        if name == "__metadata__":
            continue
        found = _tensor(blob, 8 + size, name, about, room)
        if found is None:
            tree.unread += 1
            continue
        claimed += found.storage.nbytes
        if claimed > room:
            raise DamagedError("tensors of the file lie on top of each other")
        tree.tensors.append((found, False))
    return tree


def _header(blob: Blob) -> tuple[int, dict[str, Any]]:
    size = int.from_bytes(read(blob, 0, 8), "little")
    if blob.size < 8 or size > blob.size - 8:
        raise DamagedError(f"the header should have {size:,} bytes and the file has {blob.size:,}")
    if size > MAX_HEADER:
        raise TooLargeError(f"the header has {size:,} bytes")
    try:
        header = json.loads(read(blob, 8, size))
    except (ValueError, RecursionError) as error:
        raise DamagedError("the header is no JSON") from error
    if not isinstance(header, dict):
        raise DamagedError("the header is no JSON object")
    return size, header


def _tensor(blob: Blob, base: int, name: str, about: object, room: int) -> StoredTensor | None:
    """Returns a tensor as the header describes it; None if its type is not known."""
    if not isinstance(about, dict):
        raise DamagedError(f"{name[:100]} is described by {type(about).__name__}")
    shape, offsets = _counts(about.get("shape")), _counts(about.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2:
        raise DamagedError(f"{name[:100]} has no shape or no place")
    begin, end = offsets
    if not begin <= end <= room:
        raise DamagedError(
            f"{name[:100]} ends at byte {end:,} of the numbers, of which the file has {room:,}"
        )
    dtype = DTYPES.get(SAFETENSORS.get(str(about.get("dtype")), ""))
    if dtype is None:
        return None
    count = math.prod(shape)
    if dtype.nbytes(count) != end - begin:
        raise DamagedError(f"{name[:100]} has {end - begin:,} bytes of {dtype.nbytes(count):,}")
    storage = Storage(blob, base + begin, end - begin)
    return StoredTensor((name[:300],), dtype, shape, storage, Region(0, count))


def _counts(made: object) -> tuple[int, ...] | None:
    if not isinstance(made, list) or len(made) > MAX_DIMENSIONS:
        return None
    found = tuple(n for n in made if type(n) is int and 0 <= n < 1 << 62)
    return found if len(found) == len(made) else None
