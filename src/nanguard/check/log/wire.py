"""The wire format of protocol buffers, as much of it as logs need."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def fields_of(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields the fields of a message: their numbers, and a number or the bytes they hold.

    Raises:
        ValueError: It is no message.
    """
    at = 0
    while at < len(data):
        tag, at = varint(data, at)
        kind = tag & 7
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
