"""What a scan of data, checkpoints or logs is given, and what it reports while it runs.

A reader spreads its files with ``scan.each(read_one, paths)``, where ``read_one(path, scan)`` is a
function of a module and returns something small that can be pickled: the same work is then done by
threads here, by other processes or by other machines. Bytes are read from
``with scan.at_hand(path) as local``, which brings a file here first where it lies elsewhere; what
is said about it names ``path``.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from nanguard.errors import SourceError

Item = TypeVar("Item")
Result = TypeVar("Result")

# Called with the file and the bytes that were read since the last call.
Progress = Callable[[str, int], None]
# Makes of a path a file that can be read here, and of a folder what it was.
AtHand = Callable[[Path], AbstractContextManager[Path]]


class Spread(Protocol):
    """A way to do the same work on many items, several at once, in their order."""

    def __call__(
        self,
        work: Callable[[Item, Scan], Result],
        items: Iterable[Item],
        scan: Scan,
        *,
        files: Callable[[Item], Sequence[Path]] | None = None,
        lost: Callable[[Item, SourceError], Result] | None = None,
    ) -> Iterator[Result]:
        """Yields what comes of each item; see ``Scan.each``."""


def _nobody(path: str, read: int) -> None:
    """Takes no note of progress."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What data is checked against.

    Attributes:
        label_key: The column, key or array that holds labels; None to find it.
        classes: How many classes there are; None if not known.
        groups: How many classes each data set has, by its name.
        group_key: The column or key that names the data set of a record.
        vocabulary: How many tokens there are; None if not known.
        ignored: Labels that are meant to be skipped, such as -100.
    """

    label_key: str | None = None
    classes: int | None = None
    groups: dict[str, int] = field(default_factory=dict)
    group_key: str | None = None
    vocabulary: int | None = None
    ignored: tuple[int, ...] = (-100,)


def in_threads(
    work: Callable[[Item, Scan], Result],
    items: Iterable[Item],
    scan: Scan,
    *,
    files: Callable[[Item], Sequence[Path]] | None = None,
    lost: Callable[[Item, SourceError], Result] | None = None,
) -> Iterator[Result]:
    """Yields what comes of each item, in their order; a few threads are ahead of the reader.

    Args:
        work: What is done with an item.
        items: The items.
        scan: How to scan; where several threads work, each item is done by one.
        files: Not needed: a thread cannot be limited.
        lost: Not needed: a thread is not lost.
    """
    todo = list(items)
    if scan.threads <= 1 or len(todo) <= 1:
        yield from (work(item, scan) for item in todo)
        return
    from concurrent.futures import Future, ThreadPoolExecutor

    alone = replace(scan, threads=1)
    pool = ThreadPoolExecutor(scan.threads, "scan")
    waiting: deque[Future[Result]] = deque()
    try:
        for item in todo:
            waiting.append(pool.submit(work, item, alone))
            if len(waiting) > scan.threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class Scan:
    """How files are scanned.

    Attributes:
        expected: What data is checked against.
        progress: Called while files are read.
        threads: How many threads may work at once.
        spread: How work on many files is spread.
        bring: Makes files that lie elsewhere readable.
    """

    expected: Expected = Expected()
    progress: Progress = _nobody
    threads: int = 2
    spread: Spread = in_threads
    bring: AtHand = contextlib.nullcontext

    def each(
        self,
        work: Callable[[Item, Scan], Result],
        items: Iterable[Item],
        *,
        files: Callable[[Item], Sequence[Path]] | None = None,
        lost: Callable[[Item, SourceError], Result] | None = None,
    ) -> Iterator[Result]:
        """Yields what a function makes of each item, in their order, several at once.

        Args:
            work: A function of a module, called with an item and a scan.
            items: The items; they, and what is made of them, can be pickled.
            files: Returns the files of an item; their sizes say what it may cost to read it.
            lost: Returns what comes of an item that ended the process that read it, or cost more
                than it may. Without it, that is raised.
        """
        return self.spread(work, items, self, files=files, lost=lost)

    def at_hand(self, path: Path) -> AbstractContextManager[Path]:
        """Returns a context in which a file can be read, and gives its place here."""
        return self.bring(path)

    def elsewhere(self) -> Scan:
        """Returns the same scan for another process: nobody watches, nothing is spread further."""
        return replace(self, progress=_nobody, spread=in_threads, threads=1)
