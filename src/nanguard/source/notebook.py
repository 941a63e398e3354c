"""Notebooks as Python code: the code cells in a row, with the way back to the file's lines."""

from __future__ import annotations

import ast
import json
import re
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanguard.errors import SourceError
from nanguard.source.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterator

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]', re.DOTALL)
_ASSIGNED = re.compile(r"^(\s*[\w,.][\w, .]*=\s*)[%!].*$")
_HELP = re.compile(r"^[\w.]+\?{1,2}\s*$|^\?{1,2}[\w.]+\s*$")
# Cell magics whose cell is still Python.
_PYTHON_CELL = re.compile(r"^%%(?:time|timeit|capture|prun|python3?)\b")
_CODE_LIMIT = 2 << 20


@dataclass(frozen=True, slots=True)
class Notebook:
    """The code of a notebook.

    Attributes:
        path: The file.
        code: The code cells, one below the other, each ended by a line end.
        broken: Cells that are no Python, and why.
    """

    path: str
    code: Text
    broken: tuple[tuple[str, str], ...]
    _cells: tuple[tuple[int, int], ...]
    _lines: tuple[int, ...]

    @classmethod
    def read(cls, path: str, content: str) -> Notebook:
        """Reads a notebook.

        Args:
            path: The file.
            content: What it holds.

        Raises:
            SourceError: It is no notebook with Python in it.
        """
        cells = _cells(path, content)
        places = _places(content)
        parts: list[str] = []
        starts: list[tuple[int, int]] = []
        lines: list[int] = []
        broken: list[tuple[str, str]] = []
        for number, source in cells:
            python, why = _python(source)
            if why:
                broken.append((f"cell {number}", why))
            starts.append((len(lines) + 1, number))
            parts += python
            known = places.get(number - 1, [1])
            lines += [known[min(index, len(known) - 1)] for index in range(len(python))]
        code = "".join(f"{part}\n" for part in parts)
        if len(code) > _CODE_LIMIT:
            raise _no_notebook(path, f"it holds more than {_CODE_LIMIT >> 20} MB of code")
        return cls(path, Text(path, code), tuple(broken), tuple(starts), tuple(lines))

    def place(self, line: int) -> tuple[int, str]:
        """Returns where a line of the code stands: in the file, and in words.

        Args:
            line: A line of the code, counted from 1.
        """
        if not self._lines:
            return 1, "no cell"
        line = min(max(line, 1), len(self._lines))
        first, cell = self._cells[bisect_right(self._cells, (line, 1 << 60)) - 1]
        return self._lines[line - 1], f"cell {cell}, line {line - first + 1}"


def _cells(path: str, content: str) -> list[tuple[int, str]]:
    """Returns the number and the source of every code cell; all cells are counted, from 1."""
    try:
        told = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _no_notebook(path, f"it is not complete JSON: {error}") from error
    cells = told.get("cells") if isinstance(told, dict) else None
    if not isinstance(cells, list):
        raise _no_notebook(path, "it has no cells; notebooks of format 4 have them")
    if _language(told) not in ("", "python", "ipython"):
        raise _no_notebook(path, f"its code is {_language(told)}, not Python")
    return [
        (number, _source(cell.get("source")))
        for number, cell in enumerate(cells, start=1)
        if isinstance(cell, dict) and cell.get("cell_type") == "code"
    ]


def _language(told: dict[str, Any]) -> str:
    holder: Any = told.get("metadata")
    for key in ("kernelspec", "language"):
        holder = holder.get(key) if isinstance(holder, dict) else None
    return holder.lower() if isinstance(holder, str) else ""


def _source(value: Any) -> str:
    if isinstance(value, list):
        return "".join(part for part in value if isinstance(part, str))
    return value if isinstance(value, str) else ""


def _python(source: str) -> tuple[list[str], str]:
    """Returns the lines of a cell as Python, and why they are blank if it is none."""
    source = re.sub("\r\n?", "\n", source)
    lines = source.split("\n")
    if _parses(source):
        return lines, ""
    first = next((line for line in lines if line.strip()), "")
    if first.startswith("%%") and not _PYTHON_CELL.match(first):
        return [""] * len(lines), ""
    plain = [_neutral(line) for line in lines]
    if _parses("\n".join(plain)):
        return plain, ""
    return [""] * len(lines), _syntax("\n".join(plain))


def _neutral(line: str) -> str:
    """Returns a line without what only IPython understands; as long as it is one."""
    assigned = _ASSIGNED.match(line)
    if assigned:
        return f"{assigned.group(1)}None"
    stripped = line.strip()
    if stripped[:1] in ("%", "!", "?") or _HELP.match(stripped):
        return f"{line[: len(line) - len(line.lstrip())]}pass"
    return line


def _parses(source: str) -> bool:
    return not _syntax(source)


def _syntax(source: str) -> str:
    try:
        ast.parse(source)
    except SyntaxError as error:
        return f"{error.msg} (line {error.lineno})"
    except (ValueError, RecursionError, MemoryError) as error:
        return f"it cannot be followed ({type(error).__name__})"
    return ""


def _places(content: str) -> dict[int, list[int]]:
    """Returns, for every cell counted from 0, the line of the file each of its lines is on."""
    text = Text("", content)
    strings: dict[int, list[tuple[int, str]]] = {}
    for way, at, token in _strings(content):
        if way[:1] == ["cells"] and way[2:3] == ["source"] and isinstance(way[1], int):
            line = text.position(at)[0]
            strings.setdefault(way[1], []).append((line, json.loads(token)))
    return {cell: _line_by_line(parts) for cell, parts in strings.items()}


def _line_by_line(parts: list[tuple[int, str]]) -> list[int]:
    lines, fresh = [], True
    for line, part in parts:
        for piece in part.splitlines(keepends=True):
            if fresh:
                lines.append(line)
            fresh = piece.endswith(("\n", "\r"))
    return lines or [parts[0][0]]


def _strings(content: str) -> Iterator[tuple[list[str | int], int, str]]:
    """Yields every string value of a JSON text: the way to it, its offset, how it is written."""
    path: list[str | int] = []
    key: str | None = None
    for token in _TOKEN.finditer(content):
        mark = token.group()
        if mark in "{[":
            path.append(0 if mark == "[" else "")
            key = None
        elif mark in "}]":
            path.pop()
        elif mark == ",":
            if path and isinstance(path[-1], int):
                path[-1] += 1
        elif mark == ":":
            if key is not None:
                path[-1] = key
        elif path:
            key = mark[1:-1]
            if isinstance(path[-1], int) or _follows_colon(content, token.start()):
                yield list(path), token.start(), mark


def _follows_colon(content: str, at: int) -> bool:
    return content[max(0, at - 200) : at].rstrip()[-1:] == ":"


def _no_notebook(path: str, what: str) -> SourceError:
    return SourceError(what, where=path, do="Give a notebook with code cells in Python.")
