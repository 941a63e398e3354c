"""Bytes at offsets, of a file, a part of one, or an archive, read by several threads at once."""

from __future__ import annotations

import os
import stat
import struct
import threading
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from nanguard.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from typing_extensions import Self

    from nanguard.check.checkpoint.tensors import Global


class UnreadableError(ValueError):
    """A file that cannot be read to its end.

    Attributes:
        names: What loading would have looked up before it came to this point.
    """

    names: dict[str, Global]

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.names = {}


class DamagedError(UnreadableError):
    """A file that ends early, or makes no sense from some byte on."""


class TooLargeError(UnreadableError):
    """A file that would take more memory or time than a checkpoint has any need for."""


class Blob(Protocol):
    """Something that has bytes at offsets.

    Attributes:
        path: The file the bytes come from.
        size: How many there are.
    """

    path: str
    size: int

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fills a buffer with the bytes from an offset on and returns how many there were."""


def read(blob: Blob, offset: int, size: int) -> bytes:
    """Returns bytes of a blob; fewer than asked for where it ends."""
    buffer = bytearray(max(0, min(size, blob.size - offset)))
    return bytes(buffer[: read_fully(blob, offset, memoryview(buffer))])


def read_fully(blob: Blob, offset: int, buffer: memoryview) -> int:
    """Fills a buffer, with as many reads as it takes, and returns how many bytes there were."""
    done = 0
    while done < len(buffer):
        got = blob.read_into(offset + done, buffer[done:])
        if got <= 0:
            break
        done += got
    return done


class FileBlob:
    """An open file; reading at an offset moves nothing, so threads need no lock.

    Args:
        path: The file.
        name: What it is called, where that is something else.

    Raises:
        SourceError: It is not a regular file.
        OSError: It cannot be opened.
    """

    def __init__(self, path: Path, name: str = "") -> None:
        self.path = name or str(path)
        self._file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        self._lock = threading.Lock()
        about = os.fstat(self._file)
        if not stat.S_ISREG(about.st_mode):
            self.close()
            raise SourceError(
                "This is no regular file.", where=self.path, do="Name a checkpoint on disk."
            )
        self.size = about.st_size

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fills a buffer with the bytes from an offset on."""
        if hasattr(os, "preadv"):
            return os.preadv(self._file, [buffer], offset)
        with self._lock:
            os.lseek(self._file, offset, os.SEEK_SET)
            data = os.read(self._file, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MemoryBlob:
    """Bytes that are in memory already."""

    def __init__(self, path: str, data: bytes) -> None:
        self.path = path
        self.size = len(data)
        self._data = data

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fills a buffer with the bytes from an offset on."""
        part = self._data[offset : offset + len(buffer)]
        buffer[: len(part)] = part
        return len(part)


class Window:
    """A part of a blob that is read as if it were a file of its own."""

    def __init__(self, blob: Blob, start: int, size: int) -> None:
        self.path = blob.path
        self.size = max(0, min(size, blob.size - start))
        self._blob = blob
        self._start = start

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fills a buffer with the bytes from an offset on."""
        left = self.size - offset
        if left <= 0:
            return 0
        return self._blob.read_into(self._start + offset, buffer[:left])


MAX_DIRECTORY = 1 << 25
_TAIL = 22 + 65535
_END, _END64, _LOCATOR, _ENTRY, _LOCAL = b"PK\5\6", b"PK\6\6", b"PK\6\7", b"PK\1\2", b"PK\3\4"
_FULL32 = 0xFFFFFFFF
_ENCRYPTED, _PATCHED, _STRONGLY_ENCRYPTED, _MASKED = 1, 1 << 5, 1 << 6, 1 << 13
_ODD = _ENCRYPTED | _PATCHED | _STRONGLY_ENCRYPTED | _MASKED
_FOLDER = 1 << 4
_LONGEST_NAME = 500
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
    start, size, count = _directory(blob)
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
    entries = dict(found)
    if len({name.lower() for name in entries}) < len(found):  # torch looks names up like this
        raise DamagedError("two files of the archive have the same name")
    if max(map(len, entries), default=0) > _LONGEST_NAME:
        raise DamagedError("a file of the archive has a longer name than readers take")
    return entries


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


def _directory(blob: Blob) -> tuple[int, int, int]:
    """Returns where the directory begins, its size, and how many files it promises."""
    at = max(0, blob.size - _TAIL)
    tail = read(blob, at, _TAIL)
    found = tail.rfind(_END)
    if found < 0 or len(tail) - found < 22:
        raise DamagedError("the archive has no directory: it was cut off while it was written")
    disks, count = struct.unpack_from("<I", tail, found + 4)[0], _count(tail, found)
    size, start, note = struct.unpack_from("<IIH", tail, found + 12)
    if note or found + 22 < len(tail):  # torch reads such an archive at some lengths, not at others
        raise DamagedError(f"{len(tail) - found - 22:,} bytes lie behind the end of the archive")
    end = at + found
    locator = read(blob, end - 20, 20) if end >= 20 else b""
    if locator.startswith(_LOCATOR):
        end, parts = struct.unpack_from("<QI", locator, 8)
        if parts != 1:
            raise DamagedError("the directory says that the archive is in several parts")
        record = read(blob, end, 56) if end < blob.size else b""
        said = struct.unpack_from("<Q", record, 4)[0] if len(record) == 56 else 0
        if said < 56 - 12 or not record.startswith(_END64):
            raise DamagedError("the archive has no directory where it says")
        disks, count = struct.unpack_from("<Q", record, 16)[0], _count(record, 0)
        size, start = struct.unpack_from("<QQ", record, 40)
    if disks:
        raise DamagedError("the directory says that the archive is in several parts")
    if size > end:
        raise DamagedError("the directory of the archive is longer than the archive")
    if end - size != start:
        raise DamagedError(
            f"the directory of the archive is at byte {end - size:,} and should be at {start:,}"
        )
    return start, size, count


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
        odd = flags & _ODD or disk not in (0, 1)
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


MAX_UNPACKED = 1 << 24
_DEFLATED = 8


def unpacked(blob: Blob, entry: Entry) -> Blob:
    """Returns the bytes of a compressed file.

    Raises:
        TooLargeError: It is long, or compressed in an unusual way.
        DamagedError: It cannot be unpacked.
    """
    if entry.method != _DEFLATED or max(entry.size, entry.packed) > MAX_UNPACKED:
        raise TooLargeError(
            f"a file of {entry.size:,} bytes in the archive is compressed, which torch never does"
        )
    data = read(blob, data_offset(blob, entry), entry.packed)
    try:
        found = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, entry.size + 1)
    except zlib.error as error:
        raise DamagedError("a compressed file of the archive is damaged") from error
    if len(found) != entry.size:
        raise DamagedError(f"a file of the archive has {len(found):,} bytes of {entry.size:,}")
    return MemoryBlob(blob.path, found)
