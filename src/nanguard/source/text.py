"""The text of a file: reading it within bounds, encoding, lines and offsets, writing it back.

A notebook is read as Python: its code cells in a row, with the way back to the file's lines.
"""

from __future__ import annotations

import ast
import codecs
import contextlib
import json
import os
import re
import stat
import sys
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO

from nanguard.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PYTHON_LIMIT = 2 << 20
CONFIG_LIMIT = 1 << 20
NOTEBOOK_LIMIT = 64 << 20
_BLOCK_BYTES = 256 << 10  # read at once: Python takes memory for all that it is asked to read

_COOKIE = re.compile(rb"^[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)")
_UTF16 = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]', re.DOTALL)
_ASSIGNED = re.compile(r"^(\s*[\w,.][\w, .]*=\s*)[%!].*$")
_HELP = re.compile(r"^[\w.]+\?{1,2}\s*$|^\?{1,2}[\w.]+\s*$")
# Cell magics whose cell is still Python.
_PYTHON_CELL = re.compile(r"^%%(?:time|timeit|capture|prun|python3?)\b")
_CODE_LIMIT = 2 << 20


@dataclass(frozen=True, slots=True)
class Decoded:
    """The text of a file, and what is needed to write it back as it was.

    Attributes:
        content: The text, without a byte order mark, line ends as they are.
        encoding: The encoding it was read in.
        bom: The byte order mark it began with.
        exact: Whether the text, encoded again, gives the same bytes.
    """

    content: str
    encoding: str
    bom: bytes
    exact: bool

    def encode(self, content: str) -> bytes:
        """Returns another text as bytes, in the same encoding.

        Raises:
            SourceError: The encoding has no such characters.
        """
        try:
            return self.bom + content.encode(self.encoding)
        except UnicodeEncodeError as error:
            raise SourceError(
                f"{self.encoding} cannot hold the repaired text",
                where="the repaired text",
                do="Convert the file to UTF-8.",
            ) from error


def read_head(path: str, size: int) -> bytes:
    """Returns the first bytes of a file."""
    return _read(path, size, whole=False)


def read_bytes(path: str, limit: int) -> bytes:
    """Returns what a file holds.

    Raises:
        SourceError: It cannot be read, or it is larger than the limit.
    """
    return _read(path, limit, whole=True)


def read_stdin(limit: int) -> bytes:
    """Returns what standard input holds."""
    data = sys.stdin.buffer.read(limit + 1)
    if len(data) > limit:
        raise _too_large("<stdin>", limit)
    return data


def decode(path: str, data: bytes, *, python: bool) -> Decoded:
    """Returns the text of a file.

    Args:
        path: The file.
        data: What it holds.
        python: Whether a comment may name the encoding, as in Python.

    Raises:
        SourceError: The bytes are not text in the encoding they should have.
    """
    marks = (codecs.BOM_UTF8,) if python else (codecs.BOM_UTF8, *_UTF16)
    bom = next((mark for mark in marks if data.startswith(mark)), b"")
    encoding = "utf-8"
    if bom in _UTF16:
        encoding = "utf-16-le" if bom == codecs.BOM_UTF16_LE else "utf-16-be"
    elif python:
        encoding = _declared(path, data[len(bom) :]) or encoding
        if bom and encoding != "utf-8":
            raise _unreadable(path, f"it declares {encoding}, and its first bytes say UTF-8")
    body = data[len(bom) :]
    try:
        content = body.decode(encoding)
    except (UnicodeError, LookupError) as error:
        at = f" (byte {error.start + 1})" if isinstance(error, UnicodeDecodeError) else ""
        raise _unreadable(path, f"it is not text in {encoding}{at}") from error
    if python and "\r" in content:
        # Python ends a line here too; with the same length, offsets stay what they are.
        lines = re.sub("\r(?!\n)", "\n", content)
        return Decoded(lines, encoding, bom, lines == content)
    return Decoded(content, encoding, bom, exact=True)


def _declared(path: str, body: bytes) -> str | None:
    for line in body.split(b"\n", 2)[:2]:
        found = _COOKIE.match(line)
        if found:
            name = found.group(1).decode("ascii", "replace")
            try:
                return _text_codec(name)
            except LookupError as error:
                raise _unreadable(path, f"it declares the unknown encoding {name!r}") from error
        if line.strip() and not line.lstrip().startswith(b"#"):
            return None
    return None


def _text_codec(name: str) -> str:
    found = codecs.lookup(name)
    if not getattr(found, "_is_text_encoding", True):
        raise LookupError(name)
    return found.name


def _read(path: str, limit: int, *, whole: bool) -> bytes:
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise _unreadable(path, "it is not a regular file")
            data = _up_to(file, limit + 1 if whole else limit)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _unreadable(path, f"it cannot be read: {reason}") from error
    if whole and len(data) > limit:
        raise _too_large(path, limit)
    return data


def _up_to(file: BinaryIO, most: int) -> bytes:
    """Returns what a file holds, up to a number of bytes; takes no memory for what is not there."""
    parts = []
    while most > 0 and (part := file.read(min(most, _BLOCK_BYTES))):
        parts.append(part)
        most -= len(part)
    return b"".join(parts)


def _without_waiting(path: str, flags: int) -> int:
    # A pipe without a writer would hold the program up for good.
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _unreadable(path: str, what: str) -> SourceError:
    return SourceError(what, where=path, do="Give a readable text file.")


def _too_large(path: str, limit: int) -> SourceError:
    size = f"{limit >> 20} MB" if limit >= 1 << 20 else f"{limit >> 10} KB"
    return SourceError(
        f"it is larger than {size}", where=path, do="Check a smaller file, or split it."
    )


@dataclass(frozen=True, slots=True)
class Text:
    """The text of a file.

    Attributes:
        path: The file, as the user named it.
        content: What it holds.
        bom: The byte order mark before it.
        starts: The offset at which each line begins.
    """

    path: str
    content: str
    bom: bytes = b""
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


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a file through a new one beside it; what others may do with it stays as it was.

    A link is replaced and not followed: nobody can lead the text elsewhere.

    Args:
        path: The file.
        data: What it shall hold.
    """
    import tempfile  # takes longer to import than a small file takes to check

    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.")
    temporary = path.parent / os.path.basename(name)  # noqa: PTH119 - a name, not a path
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(_mode(path))
        temporary.replace(path)
    except BaseException:  # Ctrl-C, too, and it goes on
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def own_folder(folder: Path) -> None:
    """Makes a folder for files of ours, which version control overlooks.

    Raises:
        OSError: It cannot be made, or it is a link to somewhere else.
    """
    if folder.is_symlink() or folder.parent.is_symlink():
        raise OSError(0, "it is a link to somewhere else", str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / ".gitignore"
    if not mark.is_symlink() and not mark.exists():
        write_atomically(mark, b"*\n")


def _mode(path: Path) -> int:
    try:
        status = path.lstat().st_mode
    except FileNotFoundError:
        status = None
    if status is None or stat.S_ISLNK(status):
        mask = os.umask(0)
        os.umask(mask)
        return 0o666 & ~mask
    return stat.S_IMODE(status)


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
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _no_notebook(path, f"it is not complete JSON: {error}") from error
    cells = document.get("cells") if isinstance(document, dict) else None
    if not isinstance(cells, list):
        raise _no_notebook(path, "it has no cells; notebooks of format 4 have them")
    if _language(document) not in ("", "python", "ipython"):
        raise _no_notebook(path, f"its code is {_language(document)}, not Python")
    return [
        (number, _source(cell.get("source")))
        for number, cell in enumerate(cells, start=1)
        if isinstance(cell, dict) and cell.get("cell_type") == "code"
    ]


def _language(document: dict[str, Any]) -> str:
    holder: Any = document.get("metadata")
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
