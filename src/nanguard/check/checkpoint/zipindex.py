"""The directory of a zip archive, read with a bound on its size; nothing is unpacked."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanguard.check.checkpoint.blob import Blob, read
from nanguard.check.checkpoint.inert import DamagedError, TooLargeError

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_DIRECTORY = 1 << 25
_TAIL = 22 + 65535
_END, _END64, _LOCATOR, _ENTRY, _LOCAL = b"PK\5\6", b"PK\6\6", b"PK\6\7", b"PK\1\2", b"PK\3\4"
_FULL32 = 0xFFFFFFFF
_ENCRYPTED, _MASKED, _FOLDER = 1, 1 << 13, 1 << 4
_METHODS = (0, 8)  # as it is, and deflated


@dataclass(frozen=True, slots=True)
class Entry:
    """A file in an archive.

    Attributes:
        header: Where it begins.
        size: How many bytes it has.
        packed: How many bytes it takes in the archive.
        method: How it is compressed; 0 if it is not.
    """

    header: int
    size: int
    packed: int
    method: int


def read_directory(blob: Blob) -> dict[str, Entry]:
    """Returns the files of an archive by name.

    Raises:
        DamagedError: There is no directory, which is written last, or it makes no sense.
        TooLargeError: It is longer than a checkpoint has any need for.
    """
    start, size, shift, count = _directory(blob)
    if size > MAX_DIRECTORY:
        raise TooLargeError(f"the directory of the archive has {size:,} bytes")
    data = read(blob, start, size)
    if len(data) < size or start < 0:
        raise DamagedError("the directory of the archive is cut off")
    try:
        found = list(_entries(data))
    except struct.error as error:
        raise DamagedError("the directory of the archive makes no sense") from error
    if len(found) != count:
        raise DamagedError(
            f"the directory of the archive has {len(found):,} files and promises {count:,}"
        )
    return {
        name: Entry(entry.header + shift, entry.size, entry.packed, entry.method)
        for name, entry in found
    }


def data_offset(blob: Blob, entry: Entry) -> int:
    """Returns where the bytes of a file begin.

    Raises:
        DamagedError: The file is not where the directory says, or is cut off.
    """
    head = read(blob, entry.header, 30) if entry.header >= 0 else b""
    if len(head) < 30 or not head.startswith(_LOCAL):
        raise DamagedError(f"there is no file at byte {entry.header:,} of the archive")
    if struct.unpack_from("<H", head, 6)[0] & _ENCRYPTED or entry.method not in _METHODS:
        raise DamagedError(f"the file at byte {entry.header:,} is packed in a way nobody writes")
    name, extra = struct.unpack_from("<HH", head, 26)
    offset: int = entry.header + 30 + int(name) + int(extra)
    if offset + entry.packed > blob.size:
        raise DamagedError(
            f"a file of the archive ends at byte {offset + entry.packed:,} of {blob.size:,}"
        )
    return offset


def _directory(blob: Blob) -> tuple[int, int, int, int]:
    """Returns where the directory begins, its size, how wrong its offsets are, and its length."""
    at = max(0, blob.size - _TAIL)
    tail = read(blob, at, _TAIL)
    found = tail.rfind(_END)
    if found < 0 or len(tail) - found < 22:
        raise DamagedError("the archive has no directory: it was cut off while it was written")
    disks, count = struct.unpack_from("<I", tail, found + 4)[0], _count(tail, found)
    size, start = struct.unpack_from("<II", tail, found + 12)
    end = at + found
    locator = read(blob, end - 20, 20) if end >= 20 else b""
    if locator.startswith(_LOCATOR):
        end, parts = struct.unpack_from("<QI", locator, 8)
        if parts != 1:
            raise DamagedError("the directory says that the archive is in several parts")
        record = read(blob, end, 56) if end < blob.size else b""
        if len(record) < 56 or not record.startswith(_END64):
            raise DamagedError("the archive has no directory where it says")
        disks, count = struct.unpack_from("<Q", record, 16)[0], _count(record, 0)
        size, start = struct.unpack_from("<QQ", record, 40)
    if disks:
        raise DamagedError("the directory says that the archive is in several parts")
    if size > end:
        raise DamagedError("the directory of the archive is longer than the archive")
    # Bytes in front of an archive move everything in it.
    return end - size, size, end - size - start, count


def _count(record: bytes, at: int) -> int:
    """Returns how many files the end of a directory promises."""
    wide = record.startswith(_END64, at)
    here, all_ = struct.unpack_from("<QQ" if wide else "<HH", record, at + (24 if wide else 8))
    if here != all_:
        raise DamagedError("the directory says that the archive is in several parts")
    return int(all_)


def _entries(data: bytes) -> Iterator[tuple[str, Entry]]:
    at = 0
    while data[at : at + 4] == _ENTRY:
        flags, method = struct.unpack_from("<HH", data, at + 8)
        packed, size, name_size, extra_size, note = struct.unpack_from("<IIHHH", data, at + 20)
        disk, attributes, header = struct.unpack_from("<H2xII", data, at + 34)
        begin = at + 46
        at = begin + name_size + extra_size + note
        if at > len(data):
            raise DamagedError("the directory of the archive ends within the words about a file")
        try:
            name = data[begin : begin + name_size].decode("utf-8")
        except UnicodeDecodeError as error:
            raise DamagedError("the name of a file in the archive is not UTF-8") from error
        extra = data[begin + name_size : begin + name_size + extra_size]
        entry = Entry(*_wide(header, size, packed, extra), method)
        odd = flags & (_ENCRYPTED | _MASKED) or disk not in (0, 1)
        odd = odd or (attributes & _FOLDER and entry.size)
        if odd or (not method and entry.size != entry.packed) or (entry.size and not entry.packed):
            raise DamagedError(f"{name[:100]} is described in a way that makes no sense")
        yield name, entry


def _wide(header: int, size: int, packed: int, extra: bytes) -> tuple[int, int, int]:
    """Returns numbers that may be too large for their places and are then in an extra field."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            wide = iter(struct.unpack(f"<{length // 8}Q", extra[at + 4 : at + 4 + length // 8 * 8]))
            size = next(wide, size) if size == _FULL32 else size
            packed = next(wide, packed) if packed == _FULL32 else packed
            header = next(wide, header) if header == _FULL32 else header
        at += 4 + length
    return header, size, packed
