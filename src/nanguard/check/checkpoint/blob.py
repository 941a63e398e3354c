"""Bytes at offsets: a file, a part of one, or memory, read by several threads at once."""

from __future__ import annotations

import os
import stat
import threading
from typing import TYPE_CHECKING, Protocol

from nanguard.errors import SourceError

if TYPE_CHECKING:
    from pathlib import Path

    from typing_extensions import Self


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
