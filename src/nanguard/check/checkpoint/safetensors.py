"""Files in the safetensors format: a JSON header, then the numbers."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from nanguard.check.checkpoint.tensors import Dtype

MAX_HEADER = 1 << 25  # bytes; a checkpoint of a thousand layers needs a hundredth of them
_DTYPE = re.compile(r"[BCFIU][A-Z0-9_]{1,20}")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """What the header of a file says about one tensor, once it is known to make sense.

    Attributes:
        name: Its name.
        dtype: What the header calls its type, which may be newer than this reader.
        shape: How long each dimension is.
        begin: Where its numbers begin, counted from the first number of the file.
        end: Where they end.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_entries(blob: Blob) -> tuple[int, list[TensorEntry]]:
    """Returns where the numbers of a file begin, and its tensors, in the order of the header.

    Raises:
        DamagedError: The file is not whole, or its header makes no sense.
        TooLargeError: The header is longer than a checkpoint has any need for.
    """
    size, header = _header(blob)
    room = blob.size - size - 8
    _refuse_metadata(header.pop("__metadata__", None))
    entries = [_entry(name, about, room) for name, about in header.items()]
    _refuse_gaps(entries, room)
    return 8 + size, entries


def read_safetensors(blob: Blob) -> TensorTree:
    """Returns the tensors of a file; raises what ``read_entries`` raises."""
    base, entries = read_entries(blob)
    tree = TensorTree()
    for entry in entries:
        dtype = _known(entry.dtype)
        if dtype is None:
            tree.unread += 1
            continue
        storage = Storage(blob, base + entry.begin, entry.end - entry.begin)
        region = StorageRegion(0, math.prod(entry.shape))
        found = StoredTensor((entry.name[:300],), dtype, entry.shape, storage, region)
        tree.tensors.append((found, False))
    return tree


def tensor_names(head: bytes) -> list[str]:
    """Returns the names in the header of a file, as far as the whole header is there.

    Args:
        head: The first bytes of the file.
    """
    size = int.from_bytes(head[:8], "little")
    if not 2 <= size <= min(MAX_HEADER, len(head) - 8) or head[8:9] != b"{":
        return []
    try:
        header = json.loads(head[8 : 8 + size])
    except (ValueError, RecursionError):
        return []
    return [name for name in header if name != "__metadata__"]


def _refuse_gaps(entries: list[TensorEntry], room: int) -> None:
    """Makes sure that tensors cover the numbers of a file, each byte once, as the format wants it.

    Args:
        entries: The tensors.
        room: How many bytes of numbers the file has.

    Raises:
        DamagedError: Some bytes belong to no tensor, or to several.
    """
    at = 0
    for begin, end, name in sorted((entry.begin, entry.end, entry.name) for entry in entries):
        if begin < at:
            raise DamagedError(f"{name[:100]} lies on top of another tensor")
        if begin > at:
            raise DamagedError(f"{begin - at:,} bytes before {name[:100]} belong to no tensor")
        at = end
    if at < room:
        raise DamagedError(f"the last {room - at:,} bytes belong to no tensor")


def _header(blob: Blob) -> tuple[int, dict[str, Any]]:
    size = int.from_bytes(read(blob, 0, 8), "little")
    if blob.size < 8 or size > blob.size - 8:
        raise DamagedError(f"the header should have {size:,} bytes and the file has {blob.size:,}")
    if size > MAX_HEADER:
        raise TooLargeError(f"the header has {size:,} bytes")
    try:
        header = _strict_json(read(blob, 8, size).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DamagedError("the header is no JSON") from error
    if not isinstance(header, dict):
        raise DamagedError("the header is no JSON object")
    return size, header


# The format's own reader gives up where more collections than this lie in one another.
_DEEPEST = 120


def _strict_json(text: str) -> Any:
    """Returns JSON as the format's own reader takes it, which is stricter than Python's.

    Raises:
        ValueError: It is none.
    """
    found = json.loads(
        text,
        parse_constant=_refuse_word,
        parse_float=_number,
        parse_int=_number,
        object_pairs_hook=_unique,
    )
    if "\\u" in text:  # half a character is none to other readers
        json.dumps(found, ensure_ascii=False).encode()
    inside, depth = [found] if isinstance(found, (dict, list)) else [], 0
    while inside and depth <= _DEEPEST:
        depth += 1
        inside = [
            one
            for outer in inside
            for one in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(one, (dict, list))
        ]
    if inside:
        raise ValueError("it is too deep")
    return found


def _refuse_word(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


def _number(word: str) -> float:
    if not math.isfinite(float(word)):
        raise ValueError("a number is out of range")
    return int(word) if word != "-0" and word.lstrip("-").isdigit() else float(word)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice")
    return found


def _refuse_metadata(about: object) -> None:
    """Refuses words about a file that are no texts, as the format's own reader does."""
    pairs = about.items() if isinstance(about, dict) else ()
    if about is not None and not isinstance(about, dict):
        raise DamagedError(f"__metadata__ is {type(about).__name__}, not a table of texts")
    for name, value in pairs:
        if not isinstance(value, str):
            raise DamagedError(f"__metadata__.{name[:100]} is {type(value).__name__}, not a text")


def _entry(name: str, about: object, room: int) -> TensorEntry:
    """Returns a tensor as the header describes it."""
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
    written = about.get("dtype")
    if not isinstance(written, str) or _DTYPE.fullmatch(written) is None:
        raise DamagedError(f"{name[:100]} has no type")
    dtype, count = _known(written), 1
    for length in shape:  # one by one, as other readers do
        count *= length
        if count >= 1 << 61:
            raise DamagedError(f"{name[:100]} has more elements than can be counted")
    if dtype is not None and dtype.nbytes(count) != end - begin:
        raise DamagedError(f"{name[:100]} has {end - begin:,} bytes of {dtype.nbytes(count):,}")
    return TensorEntry(name, written, shape, begin, end)


def _known(written: str) -> Dtype | None:
    """Returns the type that a header names; None if it is newer than this reader."""
    return DTYPES.get(SAFETENSORS.get(written, ""))


def _counts(made: object) -> tuple[int, ...] | None:
    if not isinstance(made, list) or len(made) > MAX_DIMENSIONS:
        return None
    found = tuple(n for n in made if type(n) is int and 0 <= n < 1 << 62)
    return found if len(found) == len(made) else None
