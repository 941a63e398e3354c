"""Cuts a text log into stretches of whole lines, with bounded memory whatever it holds."""

from __future__ import annotations

import codecs
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanguard.check.log.grammar import LONGEST

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import BinaryIO

_BLOCK = 2 << 20
# Begins a piece of a line that a carriage return has cut: it counts to the line before it.
SAME_LINE = "\0"
_COLOURS = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")


@dataclass(frozen=True, slots=True)
class Stretch:
    """Some lines of a log.

    Attributes:
        first: The number of the first line, counted from 1.
        text: The lines, without the last line's end.
        ended: Whether the last line was seen to end; it may still be being written.
    """

    first: int
    text: str
    ended: bool = True


class Cutter:
    """Cuts decoded text into stretches.

    Args:
        eager: Whether a piece that a carriage return has ended is told at once, as a progress bar
            that is looked at wants it; else only when there is too much of it.
    """

    def __init__(self, *, eager: bool = False) -> None:
        self._eager = eager
        self._left = ""
        self._line = 1
        self._inside = False
        self._dropping = False

    def cut(self, text: str) -> Iterator[Stretch]:
        """Yields the whole lines of what was read so far."""
        if self._dropping:
            end = text.find("\n")
            if end < 0:
                return
            text, self._dropping = text[end:], False
        text = self._left + text
        end = text.rfind("\n")
        endless = end < 0 and len(text) > _BLOCK
        # The last one may be half of a line's end.
        turn = text.rfind("\r", end + 1, -1) if endless or self._eager else -1
        if turn >= 0:
            yield self._stretch(text[:turn], inside_after=True)
        elif endless:
            self._dropping, self._left = True, ""
            yield self._stretch(text[:LONGEST], inside_after=True)
            return
        elif end >= 0:
            yield self._stretch(text[:end], inside_after=False)
        self._left = text[max(end, turn) + 1 :]

    @property
    def waiting(self) -> bool:
        """Whether there is a line that has no end yet."""
        return bool(self._left)

    def rest(self) -> Iterator[Stretch]:
        """Yields the line that had no end."""
        left, self._left = self._left, ""
        if left:
            yield self._stretch(left, inside_after=True, ended=False)

    def _stretch(self, text: str, *, inside_after: bool, ended: bool = True) -> Stretch:
        first, began_inside = self._line, self._inside
        self._line += text.count("\n") + (not inside_after)
        self._inside = inside_after
        if "\0" in text:
            text = text.replace("\0", "")
        if "\x1b" in text:
            text = without_colours(text)
        if "\r" in text:
            text = text.replace("\r\n", "\n").removesuffix("\r").replace("\r", "\n" + SAME_LINE)
        return Stretch(first, SAME_LINE + text if began_inside else text, ended)


def without_colours(text: str) -> str:
    """Returns a text without the sequences that colour it on a terminal."""
    return _COLOURS.sub("", text)


def stretches(path: Path, progress: Callable[[str, int], None]) -> Iterator[Stretch]:
    """Yields a file's lines, as far as it reaches when it is opened.

    Raises:
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        # What is written while it is read belongs to the next look.
        left = os.fstat(file.fileno()).st_size
        cutter, decoder = Cutter(), None
        while left > 0:
            block = file.read(min(_BLOCK, left))
            if not block:
                break
            left -= len(block)
            progress(str(path), len(block))
            decoder = decoder or decoder_of(block)
            yield from cutter.cut(decoder.decode(block))
        yield from cutter.rest()


def stretches_of(text: str) -> Iterator[Stretch]:
    """Yields the lines of a text."""
    cutter = Cutter()
    yield from cutter.cut(text)
    yield from cutter.rest()


def decoder_of(head: bytes) -> codecs.IncrementalDecoder:
    """Returns what decodes a log that begins so."""
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "utf-16"
    else:
        encoding = "utf-8-sig" if head.startswith(codecs.BOM_UTF8) else "utf-8"
    return codecs.getincrementaldecoder(encoding)("replace")


def read_exactly(file: BinaryIO, count: int) -> bytes | None:
    """Returns so many bytes; None if the file ends before."""
    data = file.read(count)
    return data if len(data) == count else None
