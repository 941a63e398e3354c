"""Which reader a data file needs, told by its first bytes and by the ending of its name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.check.data.dataset import DataFile, NeedsCodeError
from nanguard.errors import SourceError

if TYPE_CHECKING:
    from pathlib import Path

    from nanguard.check.data.watching import Watch
    from nanguard.check.scanning import Scan

JSON_LINES, CSV, PARQUET, ARROW, ARRAYS, JSON = (
    "JSON lines",
    "CSV",
    "Parquet",
    "Arrow",
    "arrays",
    "JSON",
)
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
ENDINGS = {
    ".jsonl": JSON_LINES,
    ".ndjson": JSON_LINES,
    ".jsonlines": JSON_LINES,
    ".csv": CSV,
    ".tsv": CSV,
    ".parquet": PARQUET,
    ".pq": PARQUET,
    ".arrow": ARROW,
    ".feather": ARROW,
    ".npy": ARRAYS,
    ".npz": ARRAYS,
    ".safetensors": ARRAYS,
    ".json": JSON,
}


def format_of(path: Path, head: bytes) -> str | None:
    """Returns the format of a file; None if it is none that can be read."""
    by_name = ENDINGS.get(path.suffix.lower())
    if head.startswith(b"PAR1"):
        return PARQUET
    if head.startswith(b"ARROW1") or (head.startswith(b"\xff\xff\xff\xff") and by_name == ARROW):
        return ARROW
    if head.startswith(b"\x93NUMPY") or (head.startswith(b"PK\x03\x04") and b".npy" in head):
        return ARRAYS
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
    if by_name == JSON:
        return JSON if start == b"[" else JSON_LINES if _objects(head) else None
    if by_name is None and start == b"{" and _objects(head):
        return JSON_LINES
    return by_name


def read_file(path: Path, watch: Watch, scan: Scan) -> DataFile:
    """Returns a data file, read; one that cannot be read says why."""
    with scan.at_hand(path) as here:
        out = _read_here(here, watch, scan)
    out.path = str(path)
    return out


def _read_here(path: Path, watch: Watch, scan: Scan) -> DataFile:
    with path.open("rb") as file:
        head = file.read(1 << 16)
    kind = format_of(path, head)
    out = DataFile(str(path), kind or "unknown")
    out.broken = _stand_in(head)
    if not head or out.broken:
        return out
    try:
        _read(path, watch, scan, out)
    except NeedsCodeError as error:
        out.error = error
    except SourceError as error:
        out.broken = error.what
    except ModuleNotFoundError as error:
        out.error = SourceError(
            f"{error.name} is not installed",
            where=str(path),
            do="Install it: pip install 'nanguard[scan]'",
        )
    except BaseException as error:
        # Of polars only: a panic inside of it is no Exception. Whatever else comes goes on its way.
        if not _is_polars(error):
            raise
        words = str(error).splitlines() if isinstance(error, Exception) else []
        out.broken = f"it cannot be read as {kind}" + "".join(f": {w[:200]}" for w in words[:1])
    return out


def _read(path: Path, watch: Watch, scan: Scan, out: DataFile) -> None:
    if out.format == JSON_LINES:
        from nanguard.check.data.jsonl import read_jsonl as read
    elif out.format == CSV:
        from nanguard.check.data.delimited import read_delimited as read
    elif out.format == PARQUET:
        from nanguard.check.data.columnar import read_parquet as read
    elif out.format == ARROW:
        from nanguard.check.data.columnar import read_arrow as read
    elif out.format == ARRAYS:
        from nanguard.check.data.array_reader import read_arrays as read
    elif out.format == JSON:
        from nanguard.check.data.json_list import read_json_list as read
    else:
        raise SourceError("it is no data file", where=str(path), do="Leave it out.")
    out.ledger, out.roles = read(path, watch, scan)


def _stand_in(head: bytes) -> str | None:
    """Returns what a file is that was to be data and is something in its place."""
    if head.startswith(LFS_POINTER):
        return "it is a pointer of Git LFS, not the data itself; git lfs pull brings that"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "it is UTF-16, which no reader of data expects; save it as UTF-8"
    return None


def _is_polars(error: BaseException) -> bool:
    import polars as pl

    return isinstance(error, (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError))


def _objects(head: bytes) -> bool:
    """Returns whether the first lines are JSON objects, one in each; a single one is a setting."""
    lines = [line for line in head.splitlines()[:3] if line.strip()]
    return (
        len(lines) > 1
        and all(line.strip().startswith(b"{") for line in lines)
        and (lines[0].rstrip().endswith(b"}"))
    )
