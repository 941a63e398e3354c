"""Reads new lines of a log: what they add to its series, in words, and as events of the guard."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nanguard.check.log.binary_logs import MAGIC, is_events
from nanguard.check.log.grammar import LONGEST_LINE, loads
from nanguard.check.log.series import Gathering, Log, Rows
from nanguard.check.log.table_logs import columns_of, row_of
from nanguard.check.log.text_log import Stretch, TextReader, add_loose, without_colours
from nanguard.record import EVENTS

if TYPE_CHECKING:
    from pathlib import Path

    from nanguard.check.log.quantities import Metric

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


class Unreadable(ValueError):  # noqa: N818 - it says what is so, and is told as it is
    """A file that is no text."""


def refuse_binary(name: str, head: bytes) -> None:
    """Stops at a file that is no text.

    Raises:
        Unreadable: It is none.
    """
    kind = "an event file of TensorBoard" if is_events(name, head) else ""
    kind = "a binary run of W&B" if head.startswith(MAGIC) else kind
    if kind:
        raise Unreadable(f"it is {kind}; watch reads text, JSON lines and CSV")


class _Draining(Gathering):
    """Gathers, and gives away what it has, so that a log of any length needs little memory."""

    def take(self) -> Log:
        taken, self.log = self.log, Log(self.log.path, sparse=self.log.sparse)
        self._series = {}
        return taken


class LineReader:
    """Reads one file, some lines at a time.

    Raises:
        Unreadable: It is no text.
    """

    def __init__(self, path: Path, head: bytes) -> None:
        refuse_binary(path.name, head)
        self._gathering = _Draining(str(path))
        self._text = TextReader(self._gathering)
        self._line = 1
        self._events = path.name == EVENTS or _is_record(head)
        first = head.split(b"\n", 1)[0].decode("utf-8-sig", "replace").rstrip("\r")
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
        news = News(Log(""), lines=lines)
        if self._events:
            found = [loads(line) for line in text.split("\n")]
            news.events = [record for record in found if isinstance(record, dict)]
        elif self._columns is not None:
            self._read_rows(text, *self._columns)
        else:
            self._text.read(Stretch(self._line, text, ended))
        self._line += lines
        news.log = self._gathering.take()
        last = text[-_LAST:]
        news.done, news.total = _progress(last)
        news.ended = bool(_ENDED.search(last))
        return news

    def _read_rows(self, text: str, separator: str, columns: list[Metric | None]) -> None:
        loose: dict[tuple[object, ...], Rows] = {}
        rows = csv.reader(text.split("\n"), delimiter=separator)
        number = self._line
        while True:
            try:
                cells = next(rows)
            except StopIteration:
                break
            except csv.Error:
                continue
            number += 1
            add_loose(loose, number, row_of(columns, cells))
        self._gathering.add(list(loose.values()))


def _decoded(data: bytes) -> str:
    text = data.decode("utf-8", "replace")
    if "\0" in text:
        text = text.replace("\0", "")
    if "\x1b" in text:
        text = without_colours(text)
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text.removeprefix("\ufeff").removesuffix("\n")


def _is_record(head: bytes) -> bool:
    first = loads(head.split(b"\n", 1)[0].decode("utf-8", "replace"))
    return isinstance(first, dict) and str(first.get("code", "")).startswith("RUN")


def _progress(text: str) -> tuple[int | None, int | None]:
    """Returns how many steps were made and how many there will be, as far as a text says it."""
    for pattern in _TOTALS:
        found = pattern.findall(text)
        if found:
            done, total = found[-1]
            return int(done) if done else None, int(total)
    return None, None
