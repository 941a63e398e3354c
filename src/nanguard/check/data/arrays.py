"""Arrays of npy, npz and safetensors files: rows in blocks, nothing unpickled."""

from __future__ import annotations

import json
import math
import struct
import tokenize
import zipfile
import zlib
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from nanguard.check.checkpoint.dtypes import SAFETENSORS
from nanguard.check.checkpoint.inert import DamagedError
from nanguard.check.checkpoint.safetensors import is_dtype, refuse_gaps
from nanguard.check.data.dataset import NeedsCodeError
from nanguard.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

BLOCK = 16 << 20
MAX_HEADER = 100 << 20
MAX_UNPACKED = 1 << 36  # bytes that one packed array may grow to
MAX_ARRAYS = 100_000
MAX_PLAIN, MAX_RATIO = 1 << 30, 200  # beyond both, an archive is meant to do harm
_HEADER_ERRORS = (ValueError, TypeError, EOFError, SyntaxError, tokenize.TokenError, MemoryError)
_ARCHIVE_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    OSError,
    RuntimeError,
    ValueError,
)
_SAFETENSORS = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "bf16",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
    "U16": "<u2",
    "U32": "<u4",
    "U64": "<u8",
    "BOOL": "?",
}


@dataclass(frozen=True)
class Array:
    """One array of a file.

    Attributes:
        name: Its name.
        shape: How long each dimension is.
        kind: What it holds: ``i``, ``u``, ``f``, ``b`` or something else, as NumPy calls it.
        blocks: Reads it, rows by rows, as NumPy arrays.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    blocks: Callable[[], Iterator[Any]]


def arrays_in(path: Path) -> list[Array]:
    """Returns the arrays of a file.

    Raises:
        SourceError: It cannot be read, or only by running code.
    """
    with path.open("rb") as file:
        magic = file.read(8)
    if magic.startswith(b"\x93NUMPY"):
        return [_npy(path)]
    if magic.startswith((b"PK\3\4", b"PK\5\6")):
        return _npz(path)
    return _safetensors(path)


def tensor_names(head: bytes) -> list[str] | None:
    """Returns the names in the header of a safetensors file; None if it is none."""
    header = _header(head)
    return None if header is None else [name for name in header if name != "__metadata__"]


def _npy(path: Path) -> Array:
    with path.open("rb") as file:
        shape, fortran, dtype = _npy_header(file, path)
        start = file.tell()
    size = path.stat().st_size - start
    if size < math.prod(shape) * dtype.itemsize:
        raise _error(path, f"the array is cut off: {size} bytes of its numbers are there")

    def blocks() -> Iterator[Any]:
        import numpy as np

        if not math.prod(shape):
            return
        order: Any = "F" if fortran else "C"
        data = np.memmap(path, dtype, "r", start, shape or (1,), order)
        rows = max(1, BLOCK // max(1, data.nbytes // len(data)))
        for at in range(0, len(data), rows):
            yield np.asarray(data[at : at + rows])

    return Array(path.stem, shape, dtype.kind, blocks)


def _npz(path: Path) -> list[Array]:
    try:
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
            for info in infos:
                if not info.filename.endswith(".npy"):
                    with archive.open(info) as other:  # what is written about it has to be true
                        left = MAX_PLAIN
                        while left > 0 and (data := other.read(BLOCK)):
                            left -= len(data)
            arrays = [info for info in infos if info.filename.endswith(".npy")]
            if len(arrays) > MAX_ARRAYS:
                raise _error(path, f"the archive has {len(arrays)} arrays")
            return [_member(path, archive, info) for info in arrays]
    except _ARCHIVE_ERRORS as error:
        raise _error(path, f"the archive is damaged: {error}") from error


def _member(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Array:
    name = info.filename.removesuffix(".npy")
    with archive.open(info) as file:
        shape, fortran, dtype = _npy_header(file, path)
    size = math.prod(shape) * dtype.itemsize
    if info.file_size > MAX_PLAIN and info.file_size > MAX_RATIO * info.compress_size:
        raise _error(path, f"{name} unpacks to {info.file_size} bytes from {info.compress_size}")
    if size > min(info.file_size, MAX_UNPACKED):
        raise _error(path, f"{name} promises {size} bytes and has {info.file_size}")

    def blocks() -> Iterator[Any]:
        import numpy as np

        try:
            with zipfile.ZipFile(path) as again, again.open(info) as packed:
                _npy_header(packed, path)
                if fortran and len(shape) > 1:
                    data = np.frombuffer(packed.read(size), dtype)
                    yield data.reshape(shape, order="F")
                else:
                    yield from _packed(packed, shape, dtype, path)
        except _ARCHIVE_ERRORS as error:
            raise _error(path, f"{name} is damaged: {error}") from error

    return Array(name, shape, dtype.kind, blocks)


def _packed(file: IO[bytes], shape: tuple[int, ...], dtype: Any, path: Path) -> Iterator[Any]:
    import numpy as np

    full = shape or (1,)
    row = math.prod(full[1:]) * dtype.itemsize
    if not row:
        return
    left = full[0]
    while left:
        rows = min(left, max(1, BLOCK // row))
        data = file.read(rows * row)
        if len(data) < rows * row:
            raise _error(path, "an array of the archive is cut off")
        yield np.frombuffer(data, dtype).reshape(rows, *full[1:])
        left -= rows


def _npy_header(file: IO[bytes], path: Path) -> tuple[tuple[int, ...], bool, Any]:
    from numpy.lib import format as npy

    try:
        version = npy.read_magic(file)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, fortran, dtype = read(file)
    except _HEADER_ERRORS as error:
        raise _error(path, f"the header of an array cannot be read: {error}") from error
    if any(length < 0 for length in shape):
        raise _error(path, f"an array has the shape {shape}")
    if dtype.hasobject:
        raise NeedsCodeError(
            "the array holds Python objects, which only a pickle can make",
            where=str(path),
            do="Save it as numbers; reading a pickle runs code from the file.",
        )
    return shape, fortran, dtype


def _safetensors(path: Path) -> list[Array]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= MAX_HEADER:
            raise _error(path, "the header cannot be read")
        header = _header(length.to_bytes(8, "little") + file.read(length))
    if header is None:
        raise _error(path, "the header cannot be read")
    start, size = 8 + length, path.stat().st_size
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    out = [_tensor(path, name, entry, (start, size)) for name, entry in tensors.items()]
    try:
        refuse_gaps([(*e["data_offsets"], name) for name, e in tensors.items()], size - start)
    except DamagedError as error:
        raise _error(path, str(error)) from error
    return out


def _tensor(path: Path, name: str, entry: dict[str, Any], place: tuple[int, int]) -> Array:
    import numpy as np

    if not isinstance(entry, dict):
        raise _error(path, f"{name} is not described")
    written = _SAFETENSORS.get(str(entry.get("dtype")))
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not _whole(shape) or not _whole(offsets) or len(offsets) != 2:
        raise _error(path, f"{name} has no shape or no place")
    if not is_dtype(entry.get("dtype")):
        raise _error(path, f"{name} has no type")
    if written is None and entry["dtype"] not in SAFETENSORS:
        raise _error(path, f"{name} has the type {entry['dtype']}, which is not known")
    if written is None:
        return Array(name, tuple(shape), "V", lambda: iter(()))
    dtype = np.dtype("<u2" if written == "bf16" else written)
    begin, end = place[0] + offsets[0], place[0] + offsets[1]
    if end > place[1] or end - begin != math.prod(shape) * dtype.itemsize:
        raise _error(path, f"{name} lies beyond the end of the file, or its size is wrong")

    def blocks() -> Iterator[Any]:
        if not math.prod(shape):
            return
        data = np.memmap(path, dtype, "r", begin, tuple(shape) or (1,))
        rows = max(1, BLOCK // max(1, data.nbytes // len(data)))
        for at in range(0, len(data), rows):
            part = np.asarray(data[at : at + rows])
            yield _widened(part) if written == "bf16" else part

    kind = "f" if written == "bf16" else dtype.kind
    return Array(name, tuple(shape), kind, blocks)


def _widened(half: Any) -> Any:
    """Returns bfloat16 numbers as float32, of which they are the upper half."""
    return (half.astype("<u4") << 16).view("<f4")


def _whole(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in values
    )


def _header(head: bytes) -> dict[str, Any] | None:
    length = int.from_bytes(head[:8], "little")
    if not 2 <= length <= MAX_HEADER or len(head) < 8 + length or head[8:9] != b"{":
        return None
    try:
        header = json.loads(head[8 : 8 + length])
    except (ValueError, RecursionError):
        return None
    return header if isinstance(header, dict) else None


def _error(path: Path, what: str) -> SourceError:
    return SourceError(what, where=str(path), do="Write the file again.")
