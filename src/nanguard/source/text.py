"""The text of a file: reading it within bounds, encoding, lines and offsets, writing it back."""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import stat
import sys
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nanguard.errors import SourceError

if TYPE_CHECKING:
    from pathlib import Path

PYTHON_LIMIT = 2 << 20
CONFIG_LIMIT = 1 << 20
NOTEBOOK_LIMIT = 64 << 20

_COOKIE = re.compile(rb"^[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)")
_UTF16 = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}


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
    bom = next((mark for mark in (codecs.BOM_UTF8, *_UTF16) if data.startswith(mark)), b"")
    encoding = "utf-8"
    if bom in _UTF16:
        encoding = "utf-16-le" if bom == codecs.BOM_UTF16_LE else "utf-16-be"
    elif python:
        encoding = _declared(path, data[len(bom) :]) or encoding
    body = data[len(bom) :]
    try:
        content = body.decode(encoding)
    except (UnicodeError, LookupError) as error:
        at = f" (byte {error.start + 1})" if isinstance(error, UnicodeDecodeError) else ""
        raise _unreadable(path, f"it is not text in {encoding}{at}") from error
    if python and "\r" in content:
        # Python ends a line here too; with the same length, offsets stay what they are.
        told = re.sub("\r(?!\n)", "\n", content)
        return Decoded(told, encoding, bom, told == content)
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
            data = file.read(limit + 1 if whole else limit)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _unreadable(path, f"it cannot be read: {reason}") from error
    if whole and len(data) > limit:
        raise _too_large(path, limit)
    return data


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
