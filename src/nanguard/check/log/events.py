"""Event files of TensorBoard: records of protocol buffers, read without TensorBoard."""

from __future__ import annotations

import os
import struct
from array import array
from typing import TYPE_CHECKING

from nanguard.check.log.gathering import Gathering, Rows, Which
from nanguard.check.log.lines import read_exactly
from nanguard.check.log.names import METRICS, metric_of
from nanguard.check.log.wire import bfloat16, fields_of, float32, float64, signed
from nanguard.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nanguard.check.log.series import Log
    from nanguard.check.scanning import Scan

# Scalars are small; larger records hold images, graphs and histograms.
_LARGEST = 1 << 16
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
    return b"brain.Event:" in head[12:64] or ("tfevents" in name and length < _LARGEST)


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
            gathering.add([Rows(None, steps, None, {Which(metric): values})])
    return gathering.log


def _read(path: Path, points: _Points, scan: Scan) -> str | None:
    """Adds the scalars of a file; returns why it could not be read to its end."""
    read = 0
    try:
        for record in _records(path):
            if record is None:
                # A writer may be in the middle of its last record; a file of nothing is no log.
                return None if read else "the file holds no whole record"
            read += len(record)
            if read > 1 << 20:
                scan.progress(str(path), read)
                read = 1
            _add(record, points)
    except ValueError as error:
        return f"a record is damaged or no event ({error})"
    return None


def _records(path: Path) -> Iterator[bytes | None]:
    """Yields records; None where the file ends within one.

    Raises:
        ValueError: A checksum is wrong, so that nothing behind it can be trusted.
    """
    with path.open("rb") as file:
        left = os.fstat(file.fileno()).st_size
        while left > 0:
            header = read_exactly(file, 12)
            if header is None:
                yield None
                return
            length, checksum = struct.unpack("<QI", header)
            if _masked(header[:8]) != checksum:
                raise ValueError("the checksum of its length is wrong")
            left -= length + 16
            if left < 0 or length > _MOST_RECORD:
                yield None
                return
            if length > _LARGEST:
                file.seek(length + 4, os.SEEK_CUR)
                continue
            data = read_exactly(file, length + 4)
            if data is None:
                yield None
                return
            if _masked(data[:-4]) != struct.unpack("<I", data[-4:])[0]:
                raise ValueError("its checksum is wrong")
            yield data[:-4]


def _masked(data: bytes) -> int:
    """Returns the CRC-32C of some bytes as event files hold it."""
    table, crc = _TABLE, 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _crc_table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return tuple(table)


_TABLE = _crc_table()


def _add(record: bytes, points: _Points) -> None:
    step, summary = 0, None
    for number, value in fields_of(record):
        if number == 2 and isinstance(value, int):
            step = signed(value)
        elif number == 5 and isinstance(value, bytes):
            summary = value
    if summary is None:
        return
    for number, value in fields_of(summary):
        if number == 1 and isinstance(value, bytes):
            found = _scalar(value)
            if found is not None:
                steps, values = points.setdefault(found[0], (array("q"), array("d")))
                steps.append(step)
                values.append(found[1])


def _scalar(value: bytes) -> tuple[str, float] | None:
    """Returns a tag and its number; None if the tag is of no interest or holds no scalar."""
    tag, number = "", None
    for field, inner in fields_of(value):
        if field == 1 and isinstance(inner, bytes):
            tag = inner.decode("utf-8", "replace")
        elif field == 2:
            number = float32(inner)
        elif field == 8 and isinstance(inner, bytes):
            number = _tensor(inner)
    metric = metric_of(tag)
    if number is None or metric is None or metric.role not in METRICS:
        return None
    return tag, number


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
