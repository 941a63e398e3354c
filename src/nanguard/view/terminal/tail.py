"""Follows logs that somebody else writes: growth, rotation, truncation, deletion.

New lines are read as they come, logs of other forms anew when they have changed.
"""

from __future__ import annotations

import codecs
import os
import re
import stat
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nanguard.check.log.grammar import DECODING, LONGEST_LINE, loads, marked, unmarked
from nanguard.check.log.log_reader import (
    LOG_HEAD_BYTES,
    Form,
    columns_of,
    form_of,
    gather_rows,
    open_sources,
)
from nanguard.check.log.series import Gathering, Log
from nanguard.check.log.text_log import Stretch, TextReader, without_colours
from nanguard.check.scan import Scan
from nanguard.check.workers import Workers
from nanguard.record import EVENTS

if TYPE_CHECKING:
    from pathlib import Path

# What is read of a file at once. Text that is made to be slow takes some seconds for each MiB, in
# which nothing is drawn.
CHUNK = 1 << 18
# Bytes of a line without an end that are waited for.
LONGEST = 1 << 16
# Of a larger file only the end is read: a view shows what is going on now.
BACKLOG = 64 << 20
# Bytes before the place that was reached; others there mean that the file was written anew.
_PRINT = 64
# A file is read anew after a pause of this many times what reading it took: 5 % of the time.
_SHARE = 20.0
# How much of the end of new lines is searched for how many steps there will be.
_LAST = 2000
_TOTALS = (
    re.compile(r"(?i)\b(?:step|iter(?:ation)?|update)s?\W{0,4}(\d{1,12})\s*(?:/|of)\s*(\d{1,12})"),
    re.compile(r"(?i)\b(?:total|max|num)[_ ](?:train(?:ing)?[_ ])?steps\W{1,4}()(\d{1,12})\b"),
    re.compile(r"\|\s*(\d{1,12})/(\d{1,12})\s*\["),
)
_ENDED = re.compile(
    r"(?i)\b(?:training|run|fine-?tuning)\b(?:(?!epoch|step|batch|iter).){0,20}"
    r"\b(?:completed?|finished|done|ended)\b"
    r"|\bfinished training\b|\breached max_(?:steps|epochs)\b|`Trainer\.fit` stopped"
)


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


@dataclass(slots=True)
class News:
    """What new lines say.

    Attributes:
        log: Numbers and notes.
        events: Events of the guard, as it wrote them.
        total: How many steps there will be, where a line says it.
        done: How many of them were made, as a progress bar says it.
        ended: Whether a line says that the run has ended.
        lines: How many lines there were.
    """

    log: Log
    events: list[dict[str, Any]] = field(default_factory=list)
    total: int | None = None
    done: int | None = None
    ended: bool = False
    lines: int = 0


def is_in_lines(path: Path) -> bool:
    """Returns whether a log can be read line by line, as it grows.

    Raises:
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        head = file.read(LOG_HEAD_BYTES)
    # In UTF-16 a line cannot be told from the bytes of its end.
    wide = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return not wide and form_of(path, head) in (None, Form.TEXT, Form.CSV, Form.RECORD)


class WholeLogs:
    """Logs that are read from their beginning each time one of their files has changed.

    Event files of TensorBoard, runs of W&B and histories in one JSON text are, and every log that
    is wanted only as it is now. They are read by a process that may die of them.

    Attributes:
        paths: The files.
    """

    def __init__(self) -> None:
        self.paths: list[Path] = []
        self._workers = Workers()
        self._marks: dict[Path, tuple[int, int, int]] = {}
        self._next = 0.0

    @property
    def written(self) -> float:
        """When one of the files was last written to, in seconds since 1970."""
        return max((mtime / 1e9 for _, _, mtime in self._marks.values()), default=0.0)

    def look(self) -> list[Log]:
        """Returns the logs as they are now; none if nothing has changed."""
        if not self.paths or time.monotonic() < self._next:
            return []
        marks = {path: _mark(path) for path in self.paths}
        if marks == self._marks:
            return []
        self._marks = marks
        began = time.monotonic()
        there = [path for path in self.paths if path.exists()]
        logs = list(open_sources(there, Scan(spread=self._workers.spread)))
        self._next = time.monotonic() + _SHARE * (time.monotonic() - began)
        return logs

    def close(self) -> None:
        """Ends the processes that have read."""
        self._workers.end()

    def last_words(self) -> str:
        """Returns how the texts among the files end."""
        texts = [path for path in self.paths if path.suffix != ".json" and path.is_file()]
        return "\n".join(_end_of(path) for path in texts if is_in_lines(path))


def _mark(path: Path) -> tuple[int, int, int]:
    try:
        now = path.stat()
    except OSError:
        return (0, -1, 0)
    return (now.st_ino, now.st_size, now.st_mtime_ns)


def _end_of(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _LAST))
        return file.read(_LAST).decode("utf-8", "replace")


class LineReader:
    """Reads one file, some lines at a time."""

    def __init__(self, path: Path, head: bytes) -> None:
        self._gathering = Gathering(str(path))
        self._text = TextReader(self._gathering)
        self._line = 1
        self._events = path.name == EVENTS or _is_record(head)
        first = head.split(b"\n", 1)[0].decode("utf-8-sig", DECODING).rstrip("\r")
        self._columns = columns_of(first[:LONGEST_LINE])
        self._gathering.log.sparse = self._columns is not None

    def read(self, data: bytes, *, ended: bool = True) -> News:
        """Returns what lines say.

        Args:
            data: The lines.
            ended: Whether the last one has ended.
        """
        text = _decoded(data)
        lines = text.count("\n") + 1
        news = News(self._gathering.log, lines=lines)
        if self._events:
            found = [loads(unmarked(line)) for line in text.split("\n")]
            news.events = [record for record in found if isinstance(record, dict)]
        elif self._columns is not None:
            rows = text.split("\n")
            rows = [f"{row}\n" for row in rows[:-1]] + [f"{rows[-1]}\n" if ended else rows[-1]]
            gather_rows(self._gathering, rows, self._line, *self._columns)
        else:
            self._text.read(Stretch(self._line, text, ended))
        self._line += lines
        news.log = self._gathering.take()
        last = text[-_LAST:]
        news.done, news.total = progress_in(last)
        news.ended = bool(_ENDED.search(last))
        return news


def _decoded(data: bytes) -> str:
    text = marked(data.decode("utf-8", DECODING))
    if "\x1b" in text:
        text = without_colours(text)
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text.removeprefix("\ufeff").removesuffix("\n")


def _is_record(head: bytes) -> bool:
    first = loads(head.split(b"\n", 1)[0].decode("utf-8", "replace"))
    return isinstance(first, dict) and str(first.get("code", "")).startswith("RUN")


def progress_in(text: str) -> tuple[int | None, int | None]:
    """Returns how many steps were made and how many there will be, as far as a text says it."""
    for pattern in _TOTALS:
        found = pattern.findall(text)
        if found:
            done, total = found[-1]
            return int(done) if done else None, int(total)
    return None, None
