"""A page as lines without blanks at their ends, so that a diff can be copied from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.segment import Segment

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import Console, ConsoleOptions, RenderableType


class Trimmed:
    """Shows something without the blanks that rich fills lines up with."""

    def __init__(self, body: RenderableType, width: int | None = None) -> None:
        self._body = body
        self._width = width

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        width = options.max_width if self._width is None else min(self._width, options.max_width)
        for line in console.render_lines(self._body, options.update(width=width), pad=False):
            yield from _trimmed(line)
            yield Segment.line()


def _trimmed(line: Iterable[Segment]) -> list[Segment]:
    kept = list(line)
    while kept and not kept[-1].text.rstrip():
        kept.pop()
    if kept:
        last = kept[-1]
        kept[-1] = Segment(last.text.rstrip(), last.style, last.control)
    return kept
