"""The page that ``--help`` shows: boxes of options and commands, wrapped to the terminal.

Drawn here and not with a library for tables and Markdown, whose import takes longer than
everything else that ``nanguard --help`` does.
"""

from __future__ import annotations

import os
import re
import shutil
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from typer import Context
    from typer.core import TyperCommand, TyperGroup

WIDEST = 110  # columns; longer lines are hard to read
NARROWEST = 40  # columns; below that a box holds no words
NAMES_AT_MOST = 30  # columns; a longer name has a line of its own

_CODES = {"name": "1;36", "value": "33", "note": "2", "code": "1", "border": "2", "plain": ""}
# Code between backticks, the bracket that ends an option's help, and the words between them.
_PARTS = re.compile(r"`(?P<code>[^`]+)`|(?P<note>\[[a-z][^\[\]]*\]$)|(?P<plain>[^`\[]+|\[)")


class _Word(NamedTuple):
    """A word, its style, and whether it follows a space."""

    text: str
    style: str
    apart: bool = True


def command_page(command: TyperCommand, ctx: Context) -> str:
    """Returns the help of one command."""
    paint = _Paint()
    return "\n".join([*_head(command, ctx, paint), *_boxes(command, ctx, paint)]) + "\n"


def program_page(program: TyperGroup, ctx: Context, sentences: dict[str, str]) -> str:
    """Returns the help of the whole program, with a sentence about each command."""
    paint = _Paint()
    rows = [([_Word(name, "name")], _words(text)) for name, text in sentences.items()]
    lines = [*_head(program, ctx, paint), *_boxes(program, ctx, paint)]
    return "\n".join([*lines, *paint.box("Commands", rows)]) + "\n"


def _head(command: TyperCommand | TyperGroup, ctx: Context, paint: _Paint) -> Iterator[str]:
    usage = " ".join(command.get_usage(ctx).split())
    yield ""
    yield from paint.text([_Word(word, "code") for word in usage.split()])
    yield ""
    for paragraph in (command.help or "").split("\n\n"):
        yield from paint.text(_words(paragraph))
        yield ""


def _boxes(command: TyperCommand | TyperGroup, ctx: Context, paint: _Paint) -> Iterator[str]:
    panels: dict[str, list[Any]] = {"Arguments": [], "Options": []}
    for param in command.get_params(ctx):
        usual = "Arguments" if param.param_type_name == "argument" else "Options"
        panels.setdefault(getattr(param, "rich_help_panel", None) or usual, []).append(param)
    for title, params in panels.items():
        records = [record for param in params if (record := param.get_help_record(ctx))]
        if records:
            yield from paint.box(title, [(_names(left), _words(right)) for left, right in records])
    if command.epilog:
        yield from _epilog(command.epilog, paint)


def _epilog(text: str, paint: _Paint) -> Iterator[str]:
    yield ""
    for paragraph in text.split("\n\n"):
        if paragraph.startswith("- "):
            yield from paint.text([_Word("•", "plain"), *_words(paragraph[2:])], 3, hanging=2)
        else:
            yield from paint.text(_words(paragraph))
            yield ""


def _names(text: str) -> list[_Word]:
    """Returns the names of an option, and what it takes."""
    return [_Word(word, "name" if word.startswith("-") else "value") for word in text.split()]


def _words(text: str) -> list[_Word]:
    words: list[_Word] = []
    text = " ".join(text.split())
    for part in _PARTS.finditer(text):
        style = part.lastgroup or "plain"
        inside = part[style]
        glued = part.start() > 0 and not text[part.start() - 1].isspace() and inside[:1] != " "
        words += [
            _Word(word, style, apart=number > 0 or not glued)
            for number, word in enumerate(inside.split())
        ]
    return words


class _Paint:
    """Puts words into lines of the terminal's width, coloured where colours are wanted.

    Colours for what is not a terminal are taken out by whoever prints the page.
    """

    def __init__(self) -> None:
        columns = shutil.get_terminal_size((100, 25)).columns
        self.width = max(min(columns, WIDEST), NARROWEST)
        self.colours = "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"

    def text(self, words: list[_Word], indent: int = 1, *, hanging: int = 0) -> Iterator[str]:
        """Yields a paragraph."""
        for number, line in enumerate(_lines(words, self.width - indent - hanging - 1)):
            yield " " * (indent + (hanging if number else 0)) + self._line(line)

    def box(self, title: str, rows: list[tuple[list[_Word], list[_Word]]]) -> Iterator[str]:
        """Yields a box of names and what they mean."""
        inner = self.width - 4
        left = min(max(_length(names) for names, _ in rows), NAMES_AT_MOST, inner // 2)
        rule = "─" * (inner - len(title) - 1)
        yield self._ink(f"╭─ {title} {rule}╮", "border")
        for names, meaning in rows:
            for line in self._row(names, meaning, left, inner):
                yield f"{self._ink('│', 'border')} {line} {self._ink('│', 'border')}"
        yield self._ink(f"╰{'─' * (inner + 2)}╯", "border")

    def _row(
        self, names: list[_Word], meaning: list[_Word], left: int, inner: int
    ) -> Iterator[str]:
        beside = list(_lines(meaning, inner - left - 2))
        above = list(_lines(names, inner))
        if len(above) > 1 or _length(names) > left:
            yield from (self._padded(line, inner) for line in above)
        else:
            first = beside.pop(0) if beside else []
            yield self._padded(names, left + 2) + self._padded(first, inner - left - 2)
        for line in beside:
            yield " " * (left + 2) + self._padded(line, inner - left - 2)

    def _padded(self, line: list[_Word], width: int) -> str:
        return self._line(line) + " " * (width - _length(line))

    def _line(self, line: list[_Word]) -> str:
        return "".join(
            (" " if number and word.apart else "") + self._ink(word.text, word.style)
            for number, word in enumerate(line)
        )

    def _ink(self, text: str, style: str) -> str:
        code = _CODES[style]
        return f"\x1b[{code}m{text}\x1b[0m" if self.colours and code else text


def _length(line: Iterable[_Word]) -> int:
    return sum(len(word.text) + (number > 0 and word.apart) for number, word in enumerate(line))


def _lines(words: list[_Word], width: int) -> Iterator[list[_Word]]:
    """Yields the lines of a paragraph; a word is not parted from what is glued to it."""
    line: list[_Word] = []
    chunk: list[_Word] = []
    for word in [*words, _Word("", "plain")]:
        if word.apart and chunk:
            if line and _length([*line, *chunk]) > width:
                yield line
                line = []
            line += chunk
            chunk = []
        if word.text:
            chunk.append(word)
    if line:
        yield line
