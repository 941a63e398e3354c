"""Event files of TensorBoard and offline files of Weights & Biases, read without either."""

from __future__ import annotations

import os
import struct
import zlib
from array import array
from typing import TYPE_CHECKING, Any

from nanguard.check.log.grammar import LoggedValue, line_of, loads
from nanguard.check.log.quantities import METRIC_ROLES, Metric, Quantity, metric_of
from nanguard.check.log.series import Gathering, LogRows, Which
from nanguard.check.log.text_log import add_loose
from nanguard.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import BinaryIO

    from numpy.typing import NDArray

    from nanguard.check.log.series import Log
    from nanguard.check.scan import Scan


def fields_of(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields the fields of a message: their numbers, and a number or the bytes they hold.

    Raises:
        ValueError: It is no message.
    """
    at = 0
    while at < len(data):
        tag, at = varint(data, at)
        kind = tag & 7
        if not 8 <= tag < 1 << 32:
            raise ValueError(f"field {tag >> 3} at {at}")
        if kind == 0:
            value, at = varint(data, at)
            yield tag >> 3, value
            continue
        size = 8 if kind == 1 else 4 if kind == 5 else -1
        if kind == 2:
            size, at = varint(data, at)
        if size < 0 or at + size > len(data):
            raise ValueError(f"wire type {kind} at {at}")
        yield tag >> 3, data[at : at + size]
        at += size


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns a number of variable length, and where it ends.

    Raises:
        ValueError: It does not end.
    """
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError(f"number at {at} does not end")


def signed(value: int) -> int:
    """Returns a number of variable length as the signed one it stands for."""
    return value - (1 << 64) if value >= 1 << 63 else value


def float32(data: int | bytes) -> float | None:
    """Returns the single-precision number in four bytes; None if they are none."""
    if isinstance(data, bytes) and len(data) == 4:
        return float(struct.unpack("<f", data)[0])
    return None


def float64(data: bytes) -> float | None:
    """Returns the double-precision number in eight bytes; None if they are none."""
    return float(struct.unpack("<d", data)[0]) if len(data) == 8 else None


def bfloat16(data: bytes) -> float | None:
    """Returns the bfloat16 number in two bytes; None if they are none."""
    return float32(b"\0\0" + data) if len(data) == 2 else None


# Scalars are small; of records that are larger than this, only the checksum is looked at.
_LARGEST_EVENT = 1 << 24
_LARGEST_FIRST_EVENT = 1 << 16
_MOST_RECORD = 1 << 31
# The element types of tensors that scalars are written in.
_FLOAT, _DOUBLE, _HALF, _BFLOAT16 = 1, 2, 19, 14
# (step, value) of each tag
_Points = dict[str, tuple["array[int]", "array[float]"]]


def is_events(name: str, head: bytes) -> bool:
    """Returns whether a file is an event file, by its first record."""
    if len(head) < 12:
        return "tfevents" in name and not head
    (length,) = struct.unpack("<Q", head[:8])
    return b"brain.Event:" in head[12:64] or ("tfevents" in name and length < _LARGEST_FIRST_EVENT)


def read_events(paths: list[Path], name: str, scan: Scan) -> Log:
    """Returns what the event files of one run say.

    Raises:
        OSError: A file cannot be read.
    """
    gathering = Gathering(name)
    points: _Points = {}
    for path in sorted(paths):
        broken = _read(path, points, scan)
        if broken:
            gathering.log.problem = SourceError(
                broken,
                where=str(path),
                do="What stands before it was checked; the file may be cut short or foreign.",
            )
    for tag, (steps, values) in points.items():
        metric = metric_of(tag)
        if metric is not None and values:
            gathering.add([LogRows(None, steps, None, {Which(metric): values})])
    return gathering.log


def _read(path: Path, points: _Points, scan: Scan) -> str | None:
    """Adds the scalars of a file; returns why it could not be read to its end."""
    read = 0
    try:
        for record in _event_records(path):
            if record is None:
                # A writer may be in the middle of its last record; a file of nothing is no log.
                return None if read else "the file holds no complete record"
            read += len(record) or 1
            if read > 1 << 20:
                scan.progress(str(path), read)
                read = 1
            _add_event(record, points)
    except ValueError as error:
        return f"a record is damaged or no event ({error})"
    return None


def _event_records(path: Path) -> Iterator[bytes | None]:
    """Yields records; None where the file ends within one.

    Raises:
        ValueError: A checksum is wrong, so that nothing behind it can be trusted.
    """
    with path.open("rb") as file:
        left = os.fstat(file.fileno()).st_size
        while left > 0:
            header = _read_exactly(file, 12)
            if header is None:
                yield None
                return
            length, checksum = struct.unpack("<QI", header)
            if masked_crc(header[:8]) != checksum:
                raise ValueError("the checksum of its length is wrong")
            left -= length + 16
            small = length <= _LARGEST_EVENT
            if left < 0:
                yield None
                return
            if length > _MOST_RECORD:
                raise ValueError(f"it has {length:,} bytes")
            crc, whole = _NOTHING_READ, b""
            while length > 0:
                data = file.read(min(length, _LARGEST_EVENT))
                if not data:
                    yield None
                    return
                crc, length, whole = checksummed(data, crc), length - len(data), data
            last = _read_exactly(file, 4)
            if last is None:
                yield None
                return
            if _masked(crc) != struct.unpack("<I", last)[0]:
                raise ValueError("its checksum is wrong")
            yield whole if small else b""


def masked_crc(data: bytes) -> int:
    """Returns the CRC-32C of some bytes as event files hold it."""
    return _masked(checksummed(data, _NOTHING_READ))


def _masked(register: int) -> int:
    crc = register ^ 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


_NOTHING_READ = 0xFFFFFFFF
# Long data is cut into so many pieces, which are worked on at the same time.
_PIECES, _LONG = 1 << 11, 1 << 14


def checksummed(data: bytes, register: int) -> int:
    """Returns the register of CRC-32C behind some more bytes.

    Args:
        data: The bytes.
        register: What it held before them.
    """
    size = len(data) // _PIECES
    if len(data) >= _LONG:
        register = _of_pieces(data[: size * _PIECES], register)
        data = data[size * _PIECES :]
    for byte in data:
        register = _TABLE[(register ^ byte) & 0xFF] ^ (register >> 8)
    return register


def _of_pieces(data: bytes, register: int) -> int:
    import numpy as np

    table = np.array(_TABLE, np.uint32)
    pieces = np.frombuffer(data, np.uint8).reshape(_PIECES, -1)
    found = np.zeros(_PIECES, np.uint32)
    found[0] = register
    for column in np.ascontiguousarray(pieces.T):
        found = table[(found ^ column) & 0xFF] ^ (found >> 8)
    # What as many zeros as a piece is long make of each bit of a register.
    behind = _behind_zeros(pieces.shape[1])
    while len(found) > 1:
        found = _through(behind, found[0::2]) ^ found[1::2]
        behind = _through(behind, behind)
    return int(found[0])


def _behind_zeros(count: int) -> NDArray[Any]:
    import numpy as np

    table, bits = np.array(_TABLE, np.uint32), np.uint32(1) << np.arange(32, dtype=np.uint32)
    power: NDArray[Any] = table[bits & 0xFF] ^ (bits >> 8)
    out: NDArray[Any] = bits
    while count:
        out = _through(power, out) if count & 1 else out
        power, count = _through(power, power), count >> 1
    return out


def _through(bits: NDArray[Any], registers: NDArray[Any]) -> NDArray[Any]:
    """Returns what becomes of registers, by what becomes of each of their bits."""
    out: NDArray[Any] = registers & 0
    for at in range(32):
        out ^= bits[at] * ((registers >> at) & 1)
    return out


def _crc_table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return tuple(table)


_TABLE = _crc_table()


def _add_event(record: bytes, points: _Points) -> None:
    step, summaries = 0, []
    for number, value in fields_of(record):
        if number == 2 and isinstance(value, int):
            step = signed(value)
        elif number == 5 and isinstance(value, bytes):
            summaries.append(value)
        elif number in _EVENT and isinstance(value, bytes):
            _require_sound(value, _EVENT[number])
    for summary in summaries:
        for number, value in fields_of(summary):
            if number == 1 and isinstance(value, bytes):
                found = _scalar(value)
                if found is not None:
                    steps, values = points.setdefault(found[0], (array("q"), array("d")))
                    steps.append(step)
                    values.append(found[1])


def _scalar(value: bytes) -> tuple[str, float] | None:
    """Returns a tag and its number; None if the tag is of no interest or holds no scalar.

    Raises:
        ValueError: It is damaged: TensorBoard would not read it either.
    """
    tag, number = "", None
    for field, inner in fields_of(value):
        if field == 1 and isinstance(inner, bytes):
            tag = inner.decode("utf-8")
        elif field == 2:
            number = float32(inner)
        elif field in _SUMMARY_VALUE and isinstance(inner, bytes):
            _require_sound(inner, _SUMMARY_VALUE[field])
            if field == 8:
                number = _tensor(inner)
    metric = metric_of(tag)
    if number is None or metric is None or metric.role not in METRIC_ROLES:
        return None
    return tag, number


# What the bytes of a field are: a text, numbers of one size behind one another, or a message with
# fields of its own. Those that are bytes and no more are not listed.
_TEXT, _VARINTS = "text", "numbers of variable length"
_Contents = str | int | dict[int, Any]
_SHAPE: dict[int, _Contents] = {2: {1: _VARINTS, 2: _TEXT}}
_HANDLE: dict[int, _Contents] = {1: _TEXT, 2: _TEXT, 3: _TEXT, 5: _TEXT, 6: {2: _SHAPE}}
_TENSOR: dict[int, _Contents] = {
    2: _SHAPE, 5: 4, 6: 8, 7: _VARINTS, 9: 4, 10: _VARINTS, 11: _VARINTS, 12: 8, 13: _VARINTS,
    14: _HANDLE, 15: {1: _TEXT}, 16: _VARINTS, 17: _VARINTS,
}  # fmt: skip
_METADATA: dict[int, _Contents] = {1: {1: _TEXT}, 2: _TEXT, 3: _TEXT}
_HISTOGRAM: dict[int, _Contents] = {6: 8, 7: 8}
_SUMMARY_VALUE: dict[int, _Contents] = {
    4: {}, 5: _HISTOGRAM, 6: {5: _TEXT}, 7: _TEXT, 8: _TENSOR, 9: _METADATA,
}  # fmt: skip
_EVENT: dict[int, _Contents] = {
    3: _TEXT, 6: {2: _TEXT}, 7: {2: _TEXT, 3: _TEXT}, 8: {1: _TEXT}, 10: {1: _TEXT},
}  # fmt: skip


def _require_sound(data: bytes, contents: _Contents) -> None:
    """Raises ValueError if some bytes are not what they should be."""
    if contents == _TEXT:
        data.decode("utf-8")
    elif contents == _VARINTS:
        at = 0
        while at < len(data):
            _, at = varint(data, at)
    elif isinstance(contents, int):
        if len(data) % contents:
            raise ValueError(f"{len(data)} bytes of numbers of {contents}")
    elif isinstance(contents, dict):
        for field, inner in fields_of(data):
            if field in contents and isinstance(inner, bytes):
                _require_sound(inner, contents[field])


def _tensor(data: bytes) -> float | None:
    """Returns the number in a tensor of one."""
    kind, number = _FLOAT, None
    for field, value in fields_of(data):
        if field == 1 and isinstance(value, int):
            kind = value
        elif field == 4 and isinstance(value, bytes):
            number = _packed(value, kind)
        elif field in (5, 6) and isinstance(value, bytes):
            number = float32(value) if field == 5 else float64(value)
    return number


def _packed(value: bytes, kind: int) -> float | None:
    if kind == _DOUBLE:
        return float64(value)
    if kind == _BFLOAT16:
        return bfloat16(value)
    if kind == _HALF and len(value) == 2:
        return float(struct.unpack("<e", value)[0])
    return float32(value) if kind == _FLOAT else None


MAGIC = b":W&B"
_WANDB_BLOCK_BYTES = 32768
_HEADER = 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_LARGEST_WANDB_RECORD = 4 << 20
_LONGEST_ITEM = 4096  # characters; what is longer is a table or an image, and no number
_WANDB_ROWS_AT_ONCE = 20_000
_STEP = Metric(Quantity.STEP, "step", "step")


def read_wandb(path: Path, scan: Scan) -> Log:
    """Returns what the history of an offline run says.

    Raises:
        OSError: It cannot be read.
    """
    gathering = Gathering(str(path))
    loose: dict[tuple[object, ...], LogRows] = {}
    read = 0
    try:
        for number, record in enumerate(_wandb_records(path, scan), 1):
            read = number
            _add_history(record, number, loose)
            if number % _WANDB_ROWS_AT_ONCE == 0:
                gathering.add(list(loose.values()))
                loose = {}
    except ValueError as error:
        gathering.log.problem = SourceError(
            f"a record could not be read ({error}).",
            where=str(path),
            do="What stands before it was checked; the file may be cut short.",
        )
    if not read and gathering.log.problem is None:
        gathering.log.problem = SourceError(
            "the file holds no complete record.",
            where=str(path),
            do="The run may have ended before anything was written: see its output.",
        )
    gathering.add(list(loose.values()))
    for series in gathering.log.series:
        series.lines = type(series.lines)()
    return gathering.log


def _add_history(record: bytes, number: int, loose: dict[tuple[object, ...], LogRows]) -> None:
    for field, history in fields_of(record):
        if field != 2 or not isinstance(history, bytes):
            continue
        values: dict[str, Any] = {}
        step: int | None = None
        for kind, item in fields_of(history):
            if kind == 1 and isinstance(item, bytes):
                name, text = _item(item)
                values[name] = loads(text)
            elif kind == 2 and isinstance(item, bytes):
                # All of its fields are read: one that is damaged may stand behind the step.
                steps = [signed(n) for f, n in fields_of(item) if f == 1 and isinstance(n, int)]
                step = steps[-1] if steps else 0
        line = line_of(values)
        if line.step is None and step is not None:
            line.step = LoggedValue(_STEP, step, 0, 0)
        add_loose(loose, number, line)


def _item(data: bytes) -> tuple[str, str]:
    names: list[str] = []
    text = ""
    for field, value in fields_of(data):
        if not isinstance(value, bytes):
            continue
        if field in (1, 2):
            names.append(value.decode("utf-8"))
        elif field == 16:
            text = value.decode("utf-8")
    return "/".join(names), text if len(text) < _LONGEST_ITEM else ""


def _wandb_records(path: Path, scan: Scan) -> Iterator[bytes]:
    with path.open("rb") as file:
        left = os.fstat(file.fileno()).st_size - _HEADER
        file.seek(_HEADER)
        parts: list[bytes] = []
        first = _WANDB_BLOCK_BYTES - _HEADER
        while left > 0:
            block = file.read(min(first, left))
            if not block:
                return
            left -= len(block)
            first = _WANDB_BLOCK_BYTES
            scan.progress(str(path), len(block))
            yield from _whole(block, parts)


def _whole(block: bytes, parts: list[bytes]) -> Iterator[bytes]:
    """Yields the records that end in a block; what goes on in the next is kept in parts."""
    at = 0
    while at + _HEADER <= len(block):
        checksum, length, kind = struct.unpack("<IHB", block[at : at + _HEADER])
        data = block[at + _HEADER : at + _HEADER + length]
        if kind == 0 or len(data) < length:
            return
        if zlib.crc32(block[at + _HEADER - 1 : at + _HEADER + length]) != checksum:
            raise ValueError("its checksum is wrong")
        at += _HEADER + length
        if kind in (_FULL, _FIRST):
            parts.clear()
        if sum(map(len, parts)) <= _LARGEST_WANDB_RECORD:
            parts.append(data)
        if kind in (_FULL, _LAST):
            yield b"".join(parts)
            parts.clear()
        elif kind not in (_FIRST, _MIDDLE):
            raise ValueError(f"block of type {kind}")


def _read_exactly(file: BinaryIO, count: int) -> bytes | None:
    """Returns a number of bytes; None if the file ends before."""
    data = file.read(count)
    return data if len(data) == count else None
