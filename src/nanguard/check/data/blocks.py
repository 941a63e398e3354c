"""A large file in blocks that end where a line ends, worked on by several threads in order."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from nanguard.check.scanning import Scan

BLOCK = 16 << 20
MAX_LINE = 64 << 20  # a longer line is no record of a data set
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Block:
    """Some lines of a file.

    Attributes:
        data: The lines, each with its end.
        overlong: Whether this is the beginning of a line that is too long to be read.
    """

    data: bytes
    overlong: bool = False


def blocks_of(path: Path, size: int = BLOCK) -> Iterator[Block]:
    """Yields a file's lines in blocks; a line that is too long comes as a block of its own.

    Where a block ends is found before it is read, so that nothing has to be copied.
    """
    with path.open("rb", buffering=1 << 16) as file:
        start, end = 0, file.seek(0, 2)
        while start < end:
            file.seek(min(start + size, end) - 1)
            last = file.readline(MAX_LINE)
            stop = file.tell()
            file.seek(start)
            if last.endswith(b"\n") or stop >= end:
                yield Block(file.read(stop - start))
                start = stop
                continue
            data = file.read(size)
            cut = data.rfind(b"\n") + 1
            if cut:
                yield Block(data[:cut])
            file.seek(stop)
            start = _end_of_line(file, size)
            yield Block(data[cut : cut + 1024], overlong=True)


def _end_of_line(file: IO[bytes], size: int) -> int:
    """Passes over the rest of a line, and returns where the next one begins."""
    while not (part := file.readline(size)).endswith(b"\n"):
        if not part:
            break
    return file.tell()


def in_order(
    work: Callable[[Block], Result], blocks: Iterable[Block], path: Path, scan: Scan
) -> Iterator[Result]:
    """Yields what is made of each block, in order, while others are being worked on.

    Args:
        work: Makes a result of a block.
        blocks: The blocks.
        path: The file, for the progress.
        scan: How many threads there are, and whom to tell.
    """
    waiting: deque[tuple[Future[Result], int]] = deque()
    with ThreadPoolExecutor(max(1, scan.threads)) as pool:
        for block in blocks:
            waiting.append((pool.submit(work, block), len(block.data)))
            if len(waiting) > scan.threads:
                future, read = waiting.popleft()
                yield future.result()
                scan.progress(str(path), read)
        while waiting:
            future, read = waiting.popleft()
            yield future.result()
            scan.progress(str(path), read)


def line_count(data: bytes) -> int:
    """Returns how many lines a block has; the last may lack its end."""
    import numpy as np

    ends = int(np.count_nonzero(np.frombuffer(data, dtype=np.uint8) == ord("\n")))
    return ends + (not data.endswith(b"\n"))


def line_starts(data: bytes) -> list[int]:
    """Returns where the lines of a block begin."""
    starts, at = [0], data.find(b"\n")
    while at >= 0:
        starts.append(at + 1)
        at = data.find(b"\n", at + 1)
    if starts[-1] == len(data):
        starts.pop()
    return starts


def parts_of(data: bytes, count: int) -> list[bytes]:
    """Returns a block in about so many parts that end where a line ends."""
    size, parts, at = max(1, len(data) // count), [], 0
    while at < len(data):
        cut = data.find(b"\n", min(at + size, len(data) - 1)) + 1
        end = cut or len(data)
        parts.append(data[at:end])
        at = end
    return parts
