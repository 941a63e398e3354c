"""Reads logs that are watched: new lines as they come, other forms anew when they have changed."""

from __future__ import annotations

import codecs
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nanguard.check.log.grammar import DECODING, LONGEST_LINE, loads, marked, unmarked
from nanguard.check.log.log_reader import LOG_HEAD_BYTES, Form, form_of, open_sources
from nanguard.check.log.series import Gathering, Log
from nanguard.check.log.table_logs import columns_of, gather_rows
from nanguard.check.log.text_log import Stretch, TextReader, without_colours
from nanguard.check.scan import Scan
from nanguard.record import EVENTS

if TYPE_CHECKING:
    from pathlib import Path


# Reading anew takes at most one part of the time in so many.
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

    Event files of TensorBoard, runs of W&B and histories in one JSON text are; and every log of
    which only what is there now is asked for.

    Attributes:
        paths: The files.
    """

    def __init__(self) -> None:
        self.paths: list[Path] = []
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
        logs = list(open_sources([path for path in self.paths if path.exists()], Scan()))
        self._next = time.monotonic() + _SHARE * (time.monotonic() - began)
        return logs

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
