"""Follows a file that somebody else writes: growth, rotation, truncation, deletion."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nanguard.check.log.log_reader import LOG_HEAD_BYTES

if TYPE_CHECKING:
    from pathlib import Path

# What is read of a file at once, and of a line at all.
CHUNK = 1 << 20
LONGEST = 1 << 16
# Of a larger file only the end is read: a view shows what is going on now.
BACKLOG = 64 << 20
# Bytes before the place that was reached; others there mean that the file was written anew.
_PRINT = 64


@dataclass(slots=True)
class NewLines:
    """What was new in a file.

    Attributes:
        text: Whole lines.
        news: What became of the file: ``opened``, ``truncated``, ``rotated``, ``deleted``,
            ``returned``.
        more: Whether there is more to be read at once.
    """

    text: bytes = b""
    news: list[str] = field(default_factory=list)
    more: bool = False


class Tail:
    """One file that is followed.

    Attributes:
        path: The file.
        problem: Why it cannot be read at the moment; nothing if it can.
        old: How large it was when the watch began; 0 if it came later, or was written anew.
        skipped: Bytes at the beginning that were passed over.
        offset: The place up to which it was read.
        size: How large it was at the last look.
        written: When it was last written to.
    """

    def __init__(self, path: Path, backlog: int = BACKLOG) -> None:
        self.path = path
        self.problem = ""
        self.old = self.skipped = self.offset = self.size = 0
        self.written = 0.0
        self._backlog = backlog
        self._descriptor: int | None = None
        self._identity = (0, 0)
        self._left = b""
        self._dropping = False
        self._print = b""
        self._gone = False
        self._came_late = False

    def look(self) -> NewLines:
        """Returns what is new; what is wrong with the file is in ``problem``."""
        piece = NewLines()
        try:
            if self._descriptor is None and not self._open(piece):
                return piece
            self._read(piece)
            if not piece.more:
                self._see_whether_moved(piece)
        except OSError as error:
            self.problem = f"it cannot be read ({error.strerror or error})"
            self.close()
        return piece

    def head(self) -> bytes:
        """Returns how the file begins."""
        return b"" if self._descriptor is None else os.pread(self._descriptor, LOG_HEAD_BYTES, 0)

    def rest(self) -> bytes:
        """Returns the last line, which has no end yet."""
        left, self._left = self._left, b""
        return left

    def close(self) -> None:
        """Lets go of the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self, piece: NewLines) -> bool:
        try:
            # A pipe without a writer would hold the program up for good.
            descriptor = os.open(self.path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        except FileNotFoundError:
            self.problem, self._came_late = "there is no such file", True
            return False
        self._descriptor = descriptor
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            self.close()
            self.problem = "it is no regular file"
            return False
        self.problem, self._gone = "", False
        self._identity = (found.st_dev, found.st_ino)
        self.old = 0 if self._came_late else found.st_size
        self._begin(max(0, found.st_size - self._backlog))
        self._came_late = True
        piece.news.append("opened")
        return True

    def _begin(self, offset: int) -> None:
        self.offset = self.skipped = offset
        self._left, self._dropping, self._print = b"", offset > 0, b""
        # What comes from now on is new; all of it is read.
        self._backlog = max(self._backlog, 1 << 62)

    def _read(self, piece: NewLines) -> None:
        if self._descriptor is None:
            return
        found = os.fstat(self._descriptor)
        self.size, self.written = found.st_size, found.st_mtime
        if self.size < self.offset or (self.size > self.offset and not self._same()):
            self._begin(0)
            self.old = 0
            piece.news.append("truncated")
        # What is old and what is new are never read as one piece.
        end = self.old if self.offset < self.old else self.size
        data = os.pread(self._descriptor, min(CHUNK, end - self.offset), self.offset)
        if not data:
            return
        self.offset += len(data)
        self._print = (self._print + data)[-_PRINT:]
        piece.more = self.offset < self.size
        piece.text = self._whole_lines(data)

    def _same(self) -> bool:
        """Returns whether what was read last still stands where it stood."""
        if self._descriptor is None or not self._print:
            return True
        return (
            os.pread(self._descriptor, len(self._print), self.offset - len(self._print))
            == self._print
        )

    def _whole_lines(self, data: bytes) -> bytes:
        """Returns lines that have ended; a progress bar ends its lines with a return."""
        if self._dropping:
            cut = data.find(b"\n") + 1
            if not cut:
                return b""
            data, self._dropping = data[cut:], False
        cut = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if cut:
            whole, self._left = self._left + data[:cut], data[cut:]
        else:
            whole, self._left = b"", self._left + data
        if len(self._left) > LONGEST:
            whole, self._left = whole + self._left[:LONGEST] + b"\n", b""
            self._dropping = True
        return whole

    def _see_whether_moved(self, piece: NewLines) -> None:
        try:
            found = os.stat(self.path)  # noqa: PTH116 - every look, so no object is made
        except FileNotFoundError:
            if not self._gone:
                self._gone = True
                self.problem = "it was deleted"
                piece.news.append("deleted")
            return
        if (found.st_dev, found.st_ino) == self._identity:
            return
        if piece.text or self._left:
            # First all of the old file: it may have grown until it was moved.
            piece.text, piece.more = piece.text or self.rest() + b"\n", True
        else:
            was_there = not self._gone
            self.close()
            if self._open(piece):
                piece.news[-1] = "rotated" if was_there else "returned"
                piece.more = True
