"""Offline files of Weights & Biases: a log of blocks that hold protocol buffers."""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING

from nanguard.check.log.gathering import Gathering, Rows
from nanguard.check.log.grammar import Value
from nanguard.check.log.names import Metric, Role
from nanguard.check.log.records import line_of, loads
from nanguard.check.log.text import add_loose
from nanguard.check.log.wire import fields_of, signed
from nanguard.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Any

    from nanguard.check.log.series import Log
    from nanguard.check.scanning import Scan

MAGIC = b":W&B"
_BLOCK = 32768
_HEADER = 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_LARGEST = 4 << 20
_ROWS = 20_000
_STEP = Metric(Role.STEP, "step", "step")


def read_wandb(path: Path, scan: Scan) -> Log:
    """Returns what the history of an offline run says.

    Raises:
        OSError: It cannot be read.
    """
    gathering = Gathering(str(path))
    loose: dict[tuple[object, ...], Rows] = {}
    read = 0
    try:
        for number, record in enumerate(_records(path, scan), 1):
            read = number
            _add(record, number, loose)
            if number % _ROWS == 0:
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
            "the file holds no whole record.",
            where=str(path),
            do="The run may have ended before anything was written: see its output.",
        )
    gathering.add(list(loose.values()))
    for series in gathering.log.series:
        series.lines = type(series.lines)()
    return gathering.log


def _add(record: bytes, number: int, loose: dict[tuple[object, ...], Rows]) -> None:
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
                step = next(
                    (signed(n) for f, n in fields_of(item) if f == 1 and isinstance(n, int)), 0
                )
        line = line_of(values)
        if line.step is None and step is not None:
            line.step = Value(_STEP, step, 0, 0)
        add_loose(loose, number, line)


def _item(data: bytes) -> tuple[str, str]:
    names: list[str] = []
    text = ""
    for field, value in fields_of(data):
        if not isinstance(value, bytes):
            continue
        if field in (1, 2):
            names.append(value.decode("utf-8", "replace"))
        elif field == 16 and len(value) < 4096:
            text = value.decode("utf-8", "replace")
    return "/".join(names), text


def _records(path: Path, scan: Scan) -> Iterator[bytes]:
    with path.open("rb") as file:
        left = os.fstat(file.fileno()).st_size - _HEADER
        file.seek(_HEADER)
        parts: list[bytes] = []
        first = _BLOCK - _HEADER
        while left > 0:
            block = file.read(min(first, left))
            if not block:
                return
            left -= len(block)
            first = _BLOCK
            scan.progress(str(path), len(block))
            yield from _whole(block, parts)


def _whole(block: bytes, parts: list[bytes]) -> Iterator[bytes]:
    """Yields the records that end in a block; what goes on in the next is kept in parts."""
    at = 0
    while at + _HEADER <= len(block):
        length, kind = struct.unpack("<HB", block[at + 4 : at + _HEADER])
        data = block[at + _HEADER : at + _HEADER + length]
        if kind == 0 or len(data) < length:
            return
        at += _HEADER + length
        if kind in (_FULL, _FIRST):
            parts.clear()
        if sum(map(len, parts)) <= _LARGEST:
            parts.append(data)
        if kind in (_FULL, _LAST):
            yield b"".join(parts)
            parts.clear()
        elif kind not in (_FIRST, _MIDDLE):
            raise ValueError(f"block of type {kind}")
