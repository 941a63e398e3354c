"""JSON files that are one list of records."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from nanguard.check.data.roles import Roles, roles_of
from nanguard.check.data.rows import RowReader
from nanguard.check.data.samples import columns_of, speakable
from nanguard.errors import SourceError

if TYPE_CHECKING:
    from pathlib import Path

    from nanguard.check.data.ledger import Ledger
    from nanguard.check.data.watching import Watch
    from nanguard.check.scanning import Scan

MAX_SIZE = 256 << 20  # such a file has to be held as a whole
SAMPLE = 200


def read_json_list(path: Path, watch: Watch, scan: Scan) -> tuple[Ledger, Roles]:
    """Returns what a JSON file with a list of records holds."""
    size = path.stat().st_size
    if size > MAX_SIZE:
        raise SourceError(
            f"a list of {size} bytes cannot be read in parts",
            where=str(path),
            do="Save it as JSON lines, one record in each.",
        )
    data = path.read_bytes()
    text = data.decode("utf-8-sig", "replace")
    records, broken = _records(text)
    if broken is None and (at := _foreign(data)) is not None:
        broken = "not UTF-8", 1 + data.count(b"\n", 0, at)
    sample = [speakable(value) for value, _ in records[:SAMPLE] if isinstance(value, dict)]
    columns = columns_of(sample)
    roles = roles_of(columns, watch.expected)
    reader = RowReader(roles, watch)
    for value, line in records:
        if isinstance(value, dict):
            reader.add(speakable(value), line)
        else:
            reader.ledger.refuse(line, f"a {type(value).__name__}, not an object")
    if broken is not None:
        reader.ledger.refuse(broken[1], broken[0])
        reader.ledger.damaged = True
    scan.progress(str(path), size)
    return reader.finish(), roles


def _records(text: str) -> tuple[list[tuple[Any, int]], tuple[str, int] | None]:
    """Returns the members of a list with their lines, and where it breaks off."""
    decoder = json.JSONDecoder()
    out: list[tuple[Any, int]] = []
    at, line, counted = text.find("[") + 1, 1, 0
    while True:
        at = _past_space(text, at)
        line += text.count("\n", counted, at)
        counted = at
        if not out and text[at : at + 1] == "]":
            return out, _after(text, at + 1, line)
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            why = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deep"
            return out, (f"not JSON: {why}", line)
        out.append((value, line))
        at = _past_space(text, at)
        line += text.count("\n", counted, at)
        counted = at
        if text[at : at + 1] == "]":
            return out, _after(text, at + 1, line)
        if text[at : at + 1] != ",":
            return out, ("not JSON: the list is not closed", line)
        at += 1


def _after(text: str, at: int, line: int) -> tuple[str, int] | None:
    """Returns what is wrong with what stands behind a list; None if nothing does."""
    end = _past_space(text, at)
    if end == len(text):
        return None
    return "not JSON: something stands behind the list", line + text.count("\n", at, end)


def _past_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _foreign(data: bytes) -> int | None:
    """Returns where a text stops being UTF-8; None if it does not."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start
    return None
