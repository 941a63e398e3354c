"""Arrays of npy, npz and safetensors files: rows in blocks, nothing unpickled."""

from __future__ import annotations

import ast
import io
import math
import struct
import tokenize
import zipfile
import zlib
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from nanguard.check.checkpoint.byte_ranges import FileBlob, UnreadableError
from nanguard.check.checkpoint.safetensors import TensorEntry, read_entries
from nanguard.check.checkpoint.tensors import SAFETENSORS
from nanguard.check.data.columns import (
    MAX_PLACES,
    TOKENS,
    Column,
    ColumnNumbers,
    ColumnRoles,
    LabelColumn,
    RowPlace,
    Shape,
    Tokens,
    label_of,
    plain_name,
    roles_of,
)
from nanguard.check.data.dataset import Ledger, NeedsCodeError
from nanguard.check.data.tables import MAX_WIDTH, Matrix
from nanguard.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from nanguard.check.data.dataset import WatchedValues
    from nanguard.check.scan import Scan

_NPY_MAGIC = b"\x93NUMPY"
ARRAY_BLOCK_BYTES = 16 << 20
MAX_ARRAY_BYTES = 1 << 36  # bytes that one packed array may grow to
MAX_ARRAYS = 100_000
MAX_PLAIN, MAX_RATIO = 1 << 30, 200  # beyond both, an archive is meant to do harm
_NPY_VERSIONS = ((1, 0), (2, 0), (3, 0))
_MOST_DIMENSIONS = 64  # of an array of NumPy
_HEADER_ERRORS = (
    ValueError,
    TypeError,
    EOFError,
    IndexError,
    SyntaxError,
    SystemError,  # the parser of Python 3.12, of names that are none
    tokenize.TokenError,
    MemoryError,
)
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
    if magic.startswith(_NPY_MAGIC):
        return [_npy(path)]
    if magic.startswith((b"PK\3\4", b"PK\5\6")):
        return _npz(path)
    if magic.startswith(b"\x80") and path.suffix in (".npy", ".npz"):
        raise NeedsCodeError(
            "it is a pickle, and no array",
            where=str(path),
            do="Save it as numbers; reading a pickle runs code from the file.",
        )
    return _safetensors(path)


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
        rows = max(1, ARRAY_BLOCK_BYTES // max(1, data.nbytes // len(data)))
        for at in range(0, len(data), rows):
            yield np.asarray(data[at : at + rows])

    return Array(path.stem, shape, dtype.kind, blocks)


def _npz(path: Path) -> list[Array]:
    try:
        with zipfile.ZipFile(path) as archive:
            arrays = []
            for info in archive.infolist():
                if _is_array(archive, info):
                    arrays.append(info)
                    continue
                with archive.open(info) as other:  # what is written about it has to be true
                    left = MAX_PLAIN
                    while left > 0 and (data := other.read(ARRAY_BLOCK_BYTES)):
                        left -= len(data)
            if len(arrays) > MAX_ARRAYS:
                raise _error(path, f"the archive has {len(arrays)} arrays")
            return [_member(path, archive, info) for info in arrays]
    except _ARCHIVE_ERRORS as error:
        raise _error(path, f"the archive is damaged: {error}") from error


def _is_array(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bool:
    """Returns whether a member is an array: by its name, or by how it begins, as numpy takes it."""
    if info.filename.endswith(".npy"):
        return True
    with archive.open(info) as member:
        return member.read(len(_NPY_MAGIC)) == _NPY_MAGIC


def _member(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Array:
    name = info.filename.removesuffix(".npy")
    with archive.open(info) as file:
        shape, fortran, dtype = _npy_header(file, path)
    size = math.prod(shape) * dtype.itemsize
    if info.file_size > MAX_PLAIN and info.file_size > MAX_RATIO * info.compress_size:
        raise _error(path, f"{name} unpacks to {info.file_size} bytes from {info.compress_size}")
    if size > min(info.file_size, MAX_ARRAY_BYTES):
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
        rows = min(left, max(1, ARRAY_BLOCK_BYTES // row))
        data = file.read(rows * row)
        if len(data) < rows * row:
            raise _error(path, "an array of the archive is cut off")
        yield np.frombuffer(data, dtype).reshape(rows, *full[1:])
        left -= rows


def _npy_header(file: IO[bytes], path: Path) -> tuple[tuple[int, ...], bool, Any]:
    from numpy.lib import format as npy

    try:
        version = npy.read_magic(file)
        if version not in _NPY_VERSIONS:
            raise _error(path, f"the array is written in the version {version} of the format")
        if version == (3, 0):
            file = _as_version_2(file)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, fortran, dtype = read(file)
    except _HEADER_ERRORS as error:
        raise _error(path, f"the header of an array cannot be read: {error}") from error
    if len(shape) > _MOST_DIMENSIONS or any(type(n) is not int or n < 0 for n in shape):
        raise _error(path, f"an array has the shape {shape}")
    if dtype.subdtype is not None and math.prod(dtype.subdtype[1]) != 1:
        raise _error(path, f"its elements are arrays ({dtype}), and numpy counts the numbers")
    if dtype.hasobject:
        raise NeedsCodeError(
            "the array holds Python objects, which only a pickle can make",
            where=str(path),
            do="Save it as numbers; reading a pickle runs code from the file.",
        )
    return shape, fortran, dtype


def _as_version_2(file: IO[bytes]) -> IO[bytes]:
    """Returns a header as NumPy has a function for it; version 3 differs in that it is UTF-8."""
    text = file.read(int.from_bytes(file.read(4), "little")).decode("utf-8")
    ast.literal_eval(text)  # numbers of Python 2 are none any more
    header = text.encode("ascii", "backslashreplace")
    return io.BytesIO(struct.pack("<I", len(header)) + header)


def _safetensors(path: Path) -> list[Array]:
    try:
        with FileBlob(path) as blob:
            base, entries = read_entries(blob)
    except UnreadableError as error:
        raise _error(path, str(error)) from error
    return [_tensor(path, base, entry) for entry in entries]


def _tensor(path: Path, base: int, entry: TensorEntry) -> Array:
    import numpy as np

    written, shape = _SAFETENSORS.get(entry.dtype), entry.shape
    if written is None and entry.dtype not in SAFETENSORS:
        raise _error(path, f"{entry.name} has the type {entry.dtype}, which is not known")
    if written is None:
        return Array(entry.name, shape, "V", lambda: iter(()))
    dtype = np.dtype("<u2" if written == "bf16" else written)

    def blocks() -> Iterator[Any]:
        if not math.prod(shape):
            return
        data = np.memmap(path, dtype, "r", base + entry.begin, shape or (1,))
        rows = max(1, ARRAY_BLOCK_BYTES // max(1, data.nbytes // len(data)))
        for at in range(0, len(data), rows):
            part = np.asarray(data[at : at + rows])
            yield _widened(part) if written == "bf16" else part

    kind = "f" if written == "bf16" else dtype.kind
    return Array(entry.name, shape, kind, blocks)


def _widened(half: Any) -> Any:
    """Returns bfloat16 numbers as float32, of which they are the upper half."""
    return (half.astype("<u4") << 16).view("<f4")


def _error(path: Path, what: str) -> SourceError:
    return SourceError(what, where=str(path), do="Write the file again.")


_KINDS: dict[str, Shape] = {"i": "int", "u": "int", "f": "float", "b": "bool"}
MANY_COLUMNS = 5000


def read_arrays(path: Path, watch: WatchedValues, scan: Scan) -> tuple[Ledger, ColumnRoles]:
    """Returns what a file of arrays holds."""
    arrays = {array.name: array for array in arrays_in(path)}
    roles = _roles(list(arrays.values()), watch)
    ledger = Ledger(records=max((a.shape[0] if a.shape else 1 for a in arrays.values()), default=0))
    done = _Progress(path, scan)
    if roles.label is not None:
        ledger.labels = _labels(_alike(roles.label, arrays), watch, done)
    targets = (roles.targets,) if roles.targets is not None else ()
    for column in (*roles.tokens, *targets):
        ledger.tokens[column.name] = _tokens(
            arrays[column.name], watch, done, targets=column in targets
        )
    for column in roles.features:
        _feature(arrays[column.name], ledger, done)
    return ledger, roles


class _Progress:
    def __init__(self, path: Path, scan: Scan) -> None:
        self.path, self.scan = path, scan

    def blocks(self, array: Array) -> Iterator[tuple[int, Any]]:
        """Yields an array's blocks, each with its first record."""
        at = 0
        for block in array.blocks():
            yield at, block
            at += len(block)
            self.scan.progress(str(self.path), int(block.nbytes))


def _roles(arrays: list[Array], watch: WatchedValues) -> ColumnRoles:
    columns = []
    for array in arrays:
        shape = _KINDS.get(array.kind, "other")
        deep = len(array.shape) > 1
        listed: Shape = "ints" if shape in ("int", "bool") else "floats"
        columns.append(
            Column(array.name, listed if deep and shape != "other" else shape, len(array.shape) - 1)
        )
    roles = roles_of([_as_list(column) for column in columns], watch.expected)
    if watch.expected.vocabulary and not roles.tokens and roles.label is None:
        whole = tuple(c for c in columns if c.shape in ("int", "ints"))
        if len(columns) == 1 and whole:
            return ColumnRoles(tokens=whole, names=roles.names)
    return roles


def _as_list(column: Column) -> Column:
    """Returns a row of token ids as what it is: a sequence, although it has one dimension."""
    if column.shape == "int" and plain_name(column.name) in TOKENS:
        return Column(column.name, "ints", 1)
    return column


def _alike(label: Column, arrays: dict[str, Array]) -> list[Array]:
    """Returns the labels, and those of other parts of the data: ``y_test`` beside ``y_train``."""
    first = arrays[label.name]
    others = [
        array
        for array in arrays.values()
        if array is not first
        and plain_name(array.name) == plain_name(first.name)
        and len(array.shape) == len(first.shape)
    ]
    return [first, *others]


def _labels(arrays: list[Array], watch: WatchedValues, done: _Progress) -> LabelColumn:
    labels = LabelColumn(arrays[0].name, many=math.prod(arrays[0].shape[1:]) > 1)
    for array in arrays:
        for first, block in done.blocks(array):
            add_labels(labels, block, first, watch)
    return labels


def add_labels(labels: LabelColumn, block: Any, first: int, watch: WatchedValues) -> None:
    """Counts a block of labels, a NumPy array whose rows are records.

    Args:
        labels: What was counted so far.
        block: The labels.
        first: The record of the first row.
        watch: What to look out for.
    """
    import numpy as np

    width = math.prod(block.shape[1:]) or 1
    flat, kind = block.reshape(-1), block.dtype.kind
    if kind not in "iufb" or labels.overflowed:
        return
    if kind == "f":
        _note_missing(flat, labels, first, width)
    known = flat[np.isfinite(flat)] if kind == "f" else flat
    values, counts = np.unique(known, return_counts=True)
    if len(values) > MANY_COLUMNS and kind == "f":
        labels.overflowed = True
        labels.total += int(known.size)
        labels.fractional += int((known != np.round(known)).sum())
        return
    for value, count in zip(values.tolist(), counts.tolist(), strict=True):
        label = label_of(None, value)
        wanted = MAX_PLACES if watch.suspects(label) else 1
        at = _first(flat, value, wanted)
        labels.add(label, count, [RowPlace(first + p // width, None, str(value)) for p in at])


def _first(flat: Any, value: Any, wanted: int) -> list[int]:
    """Returns where a value stands first; one place is found without looking at all."""
    import numpy as np

    if wanted == 1:
        return [int((flat == value).argmax())]
    return [int(at) for at in np.flatnonzero(flat == value)[:wanted]]


def _note_missing(flat: Any, labels: LabelColumn, first: int, width: int) -> None:
    """Notes labels that are NaN, which stands for none, and infinite ones."""
    import numpy as np

    for places, wrong in ((labels.missing, np.isnan(flat)), (labels.infinite, np.isinf(flat))):
        bad = np.flatnonzero(wrong)
        for at in bad[:MAX_PLACES]:
            places.add(RowPlace(first + int(at) // width, None, str(float(flat[at]))), 0)
        places.count += int(bad.size)


def _tokens(array: Array, watch: WatchedValues, done: _Progress, *, targets: bool) -> Tokens:
    tokens = Tokens(array.name, targets=targets)
    for first, block in done.blocks(array):
        add_tokens(tokens, block, first, watch)
    return tokens


def add_tokens(tokens: Tokens, block: Any, first: int, watch: WatchedValues) -> None:
    """Counts a block of token ids, a NumPy array whose rows are records."""
    import numpy as np

    size = watch.expected.vocabulary
    width = math.prod(block.shape[1:]) or 1
    flat = block.reshape(-1)
    if not flat.size:
        return
    low, high = int(flat.min()), int(flat.max())
    tokens.widen(low, high, int(flat.size))
    if low >= 0 and (size is None or high < size):
        return
    wrong = flat < 0
    if size is not None:
        wrong |= flat >= size
    if tokens.targets:
        wrong &= ~np.isin(flat, list(watch.ignored))
    bad = np.flatnonzero(wrong)
    for at in bad[:MAX_PLACES]:
        tokens.outside.add(RowPlace(first + int(at) // width, None, str(int(flat[at]))), 0)
    tokens.outside.count += int(bad.size)


def _feature(array: Array, ledger: Ledger, done: _Progress) -> None:
    width = math.prod(array.shape[1:]) or 1
    whole = array.kind != "f"
    if len(array.shape) <= 2 and width <= MAX_WIDTH:
        matrix = Matrix(array.name, width)
        for first, block in done.blocks(array):
            matrix.add(block.reshape(len(block), width), first)
        ledger.columns |= matrix.columns(whole=whole)
        ledger.zero.merge(matrix.zero, 0, 0)
        return
    numbers = ColumnNumbers(array.name, whole=whole, alone=False)
    for first, block in done.blocks(array):

        def place(at: int, value: str, first: int = first) -> RowPlace:
            return RowPlace(first + at // width, None, value)

        numbers.add(block.reshape(-1), place)
    ledger.columns[array.name] = numbers
