"""Files in the safetensors format: a JSON header, then the numbers."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from nanguard.check.checkpoint.byte_ranges import Blob, DamagedError, TooLargeError, read
from nanguard.check.checkpoint.tensor_tree import TensorTree
from nanguard.check.checkpoint.tensors import (
    DTYPES,
    MAX_DIMENSIONS,
    SAFETENSORS,
    Storage,
    StorageRegion,
    StoredTensor,
)

MAX_HEADER = 1 << 25
_DTYPE = re.compile(r"[BCFIU][A-Z0-9_]{1,20}")


def read_safetensors(blob: Blob) -> TensorTree:
    """Returns the tensors of a file.

    Raises:
        DamagedError: The file is not whole.
        TooLargeError: The header is longer than a checkpoint has any need for.
    """
    size, header = _header(blob)
    tree = TensorTree()
    room = blob.size - size - 8
    places = []
    for name, about in header.items():
        if name == "__metadata__":
            _refuse_metadata(about)
            continue
        found, begin, end = _tensor(blob, 8 + size, name, about, room)
        places.append((begin, end, name))
        if found is None:
            tree.unread += 1
        else:
            tree.tensors.append((found, False))
    refuse_gaps(places, room)
    return tree


def refuse_gaps(places: list[tuple[int, int, str]], room: int) -> None:
    """Makes sure that tensors cover the numbers of a file, each byte once, as the format wants it.

    Args:
        places: Where each tensor begins and ends, and its name.
        room: How many bytes of numbers the file has.

    Raises:
        DamagedError: Some bytes belong to no tensor, or to several.
    """
    at = 0
    for begin, end, name in sorted(places):
        if begin < at:
            raise DamagedError(f"{name[:100]} lies on top of another tensor")
        if begin > at:
            raise DamagedError(f"{begin - at:,} bytes before {name[:100]} belong to no tensor")
        at = end
    if at < room:
        raise DamagedError(f"the last {room - at:,} bytes belong to no tensor")


def is_dtype(written: object) -> bool:
    """Returns whether a word may name a type of numbers, also one that is newer than this."""
    return isinstance(written, str) and _DTYPE.fullmatch(written) is not None


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


def _refuse_metadata(about: object) -> None:
    """Refuses words about a file that are no texts, as the format's own reader does."""
    pairs = about.items() if isinstance(about, dict) else ()
    if about is not None and not isinstance(about, dict):
        raise DamagedError(f"__metadata__ is {type(about).__name__}, not a table of texts")
    for name, value in pairs:
        if not isinstance(value, str):
            raise DamagedError(f"__metadata__.{name[:100]} is {type(value).__name__}, not a text")


def _tensor(
    blob: Blob, base: int, name: str, about: object, room: int
) -> tuple[StoredTensor | None, int, int]:
    """Returns a tensor as the header describes it, None if its type is not known; and its place."""
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
    if not is_dtype(about.get("dtype")):
        raise DamagedError(f"{name[:100]} has no type")
    dtype = DTYPES.get(SAFETENSORS.get(str(about.get("dtype")), ""))
    if dtype is None:
        return None, begin, end
    count = math.prod(shape)
    if dtype.nbytes(count) != end - begin:
        raise DamagedError(f"{name[:100]} has {end - begin:,} bytes of {dtype.nbytes(count):,}")
    storage = Storage(blob, base + begin, end - begin)
    return StoredTensor((name[:300],), dtype, shape, storage, StorageRegion(0, count)), begin, end


def _counts(made: object) -> tuple[int, ...] | None:
    if not isinstance(made, list) or len(made) > MAX_DIMENSIONS:
        return None
    found = tuple(n for n in made if type(n) is int and 0 <= n < 1 << 62)
    return found if len(found) == len(made) else None
