"""A file's text, and the way between its lines and its offsets."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Text:
    """The text of a file.

    Attributes:
        path: The file, as the user named it.
        content: What it holds.
        starts: The offset at which each line begins.
    """

    path: str
    content: str
    starts: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        starts, at = [0], self.content.find("\n")
        while at >= 0:
            starts.append(at + 1)
            at = self.content.find("\n", at + 1)
        object.__setattr__(self, "starts", tuple(starts))

    def line(self, number: int) -> str:
        """Returns a line, counted from 1, without its end."""
        if not 1 <= number <= len(self.starts):
            return ""
        start = self.starts[number - 1]
        end = self.content.find("\n", start)
        return self.content[start : None if end < 0 else end].rstrip("\r")

    def offset(self, line: int, column: int) -> int:
        """Returns the offset of a line, counted from 1, and a column, counted from 0."""
        return self.starts[line - 1] + column

    def position(self, offset: int) -> tuple[int, int]:
        """Returns the line and the column of an offset, both counted from 1."""
        line = bisect_right(self.starts, offset)
        return line, offset - self.starts[line - 1] + 1
