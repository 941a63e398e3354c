"""JSON files that are one list of records."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from nanguard.errors import SourceError
from nanguard.sources.data.roles import Roles, roles_of
from nanguard.sources.data.rows import RowReader
from nanguard.sources.data.samples import columns_of

if TYPE_CHECKING:
    from pathlib import Path

    from nanguard.sources.data.ledger import Ledger
    from nanguard.sources.data.watching import Watch
    from nanguard.sources.scanning import Scan

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
    text = path.read_bytes().decode("utf-8-sig", "replace")
    records, broken = _records(text)
    columns = columns_of(value for value, _ in records[:SAMPLE] if isinstance(value, dict))
    roles = roles_of(columns, watch.expected)
    reader = RowReader(roles, watch)
    for value, line in records:
        if isinstance(value, dict):
            reader.add(value, line)
        else:
            reader.ledger.refuse(line, f"a {type(value).__name__}, not an object")
    if broken is not None:
        reader.ledger.refuse(broken[1], broken[0])
    scan.progress(str(path), size)
    return reader.finish(), roles


def _records(text: str) -> tuple[list[tuple[Any, int]], tuple[str, int] | None]:
    """Returns the members of a list with their lines, and where it breaks off."""
    decoder = json.JSONDecoder()
    out: list[tuple[Any, int]] = []
    at, line, counted = text.find("[") + 1, 1, 0
    while True:
        at = _past(text, at)
        line += text.count("\n", counted, at)
        counted = at
        if at < len(text) and text[at] == "]":
            return out, None
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            why = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deep"
            return out, (f"not JSON: {why}", line)
        out.append((value, line))


def _past(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n,":
        at += 1
    return at
