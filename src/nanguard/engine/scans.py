"""The check of data, checkpoints and logs: large files, read in pieces by several threads."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanguard.engine.judging import in_order, judge
from nanguard.engine.outcome import FileOutcome, Seen, failure, reason_of
from nanguard.errors import SourceError
from nanguard.sources.kinds import SCANNED, FileKind, reader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from nanguard.engine.selection import Selection
    from nanguard.rules.rule import Reads, Rule
    from nanguard.sources.scanning import Scan

# What is wrong with data explains what is wrong with the rest.
_ORDER: tuple[Reads, ...] = ("data", "checkpoint", "log")
_UNWANTED = "no rule that reads it is selected"
_UNREAD = "its reader has nothing to say about it"


class StoppedError(BaseException):
    """Raised in a thread that reads, once the check is broken off."""


@dataclass(slots=True)
class Meter:
    """Counts the bytes that were read, by any thread.

    Attributes:
        total: How many there are.
        tell: Told how many were read, and how many there are.
        done: How many were read.
        stopped: Whether nobody waits for the result any more.
    """

    total: int
    tell: Callable[[int, int], None] | None = None
    done: int = 0
    stopped: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, path: str, read: int) -> None:
        """Takes note of bytes.

        Raises:
            StoppedError: The check was broken off.
        """
        if self.stopped:
            raise StoppedError(path)
        if self.tell is None:
            return
        with self._lock:
            self.done += read
            self.tell(min(self.done, self.total), self.total)


@dataclass(slots=True)
class Scans:
    """Data, checkpoints and logs.

    Attributes:
        tops: The folders that the user named.
        files: The files, by who reads them.
    """

    tops: list[str] = field(default_factory=list)
    files: dict[str, list[str]] = field(default_factory=dict)

    def take(self, kind: FileKind, path: str) -> None:
        """Takes in a file."""
        self.files.setdefault(SCANNED[kind], []).append(str(Path(path)))

    def size(self) -> int:
        """Returns how many bytes there are to read."""
        return sum(_size(path) for paths in self.files.values() for path in paths)

    def check(self, selection: Selection, scan: Scan) -> Iterator[FileOutcome]:
        """Yields what came of every source, in a fixed order."""
        for name in _ORDER:
            paths = self.files.get(name, [])
            rules = selection.rules(name) if paths else ()
            if paths and not rules:
                yield from (FileOutcome.left_out(path, _UNWANTED) for path in paths)
            elif paths:
                yield from self._scanned(Bench(name, rules, selection, scan), paths)

    def _scanned(self, bench: Bench, paths: list[str]) -> Iterator[FileOutcome]:
        """Yields what came of folders that are one source, then of files in none of them."""
        covered: set[str] = set()
        for some in (claimed(bench.name, paths, self.tops), paths):
            left = [path for path in some if not _is_in(path, covered)]
            for outcome in bench.outcomes(left):
                covered.add(outcome.path)
                yield outcome
        for path in paths:
            if not _is_in(path, covered):
                yield FileOutcome.left_out(path, _UNREAD)


@dataclass(frozen=True, slots=True)
class Bench:
    """What sources of one kind are laid on to be judged.

    Attributes:
        name: Who reads them.
        rules: Who judges them.
        selection: Which rules apply to which file.
        scan: How they are read.
    """

    name: str
    rules: Sequence[Rule[Any]]
    selection: Selection
    scan: Scan

    def outcomes(self, paths: Sequence[str]) -> Iterator[FileOutcome]:
        """Yields what came of each file of each source.

        A reader that fails may have failed over one file; the others are read without it.
        """
        if not paths:
            return
        done: set[str] = set()
        try:
            for source in reader(self.name).open_sources([Path(p) for p in paths], self.scan):
                for outcome in self._judged(source):
                    done.add(outcome.path)
                    yield outcome
        except Exception as error:  # noqa: BLE001 - the other files have to be checked
            left = [path for path in paths if not _is_in(path, done)]
            if len(paths) == 1:
                yield FileOutcome.left_out(paths[0], _reason(error))
            else:
                for path in left:
                    yield from self.outcomes([path])

    def _judged(self, source: Any) -> Iterator[FileOutcome]:
        """Yields what rules say about a source, then the other files it was read from."""
        first, *more = files_of(source)
        findings, failed = judge(self.rules, source, first)
        kept = [f for f in findings if self.selection.applies(f.code, f.name, f.path or first)]
        outcome = FileOutcome(first, [Seen(f) for f in in_order(kept)], not_checked=failed)
        error = getattr(source, "error", None)
        if isinstance(error, SourceError) and not findings:
            outcome = FileOutcome.left_out(first, reason_of(error))
        yield outcome
        yield from (FileOutcome(path) for path in more)


def files_of(source: Any) -> list[str]:
    """Returns the files a source was read from; the folder if it does not say."""
    files = getattr(source, "files", None) or [source.path]
    return [str(file) for file in files]


def claimed(name: str, paths: Sequence[str], tops: Sequence[str]) -> list[str]:
    """Returns the folders that are one source: of several in each other, the outermost.

    Args:
        name: Who reads them.
        paths: The files that were found.
        tops: The folders that the user named; none above them is asked about.
    """
    asked: dict[str, bool] = {}
    found: dict[str, None] = {}
    limits = {str(Path(top)) for top in tops}
    for path in paths:
        for folder in _above(path, limits):
            if folder not in asked:
                asked[folder] = reader(name).recognises_folder(Path(folder))
            if asked[folder]:
                found[folder] = None
                break
    return list(found)


def _above(path: str, limits: set[str]) -> list[str]:
    """Returns the folders a file is in, the outermost that was named first; none if none was."""
    folders = [str(folder) for folder in Path(path).parents]
    last = next((n for n in range(len(folders) - 1, -1, -1) if folders[n] in limits), -1)
    return folders[last::-1] if last >= 0 else []


def _is_in(path: str, covered: set[str]) -> bool:
    return path in covered or any(str(folder) in covered for folder in Path(path).parents)


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size  # noqa: PTH116 - may be gone by now
    except OSError:
        return 0


def _reason(error: Exception) -> str:
    return reason_of(error) if isinstance(error, SourceError) else failure(error)
