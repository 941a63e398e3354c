"""The check of data, checkpoints and logs: large files, read in threads or on a Ray cluster."""

from __future__ import annotations

import os
import threading
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nanguard.check.outcome import (
    FileOutcome,
    NotChecked,
    Omission,
    Seen,
    failure,
    in_order,
    judge,
)
from nanguard.check.paths import SCANNED, FileKind, reader
from nanguard.errors import MissingDependencyError, SourceError, installing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from nanguard.check.paths import Source
    from nanguard.check.rule import Reads, Rule
    from nanguard.check.scan import Scan
    from nanguard.check.selection import Selection

# What is wrong with data explains what is wrong with the rest.
_ORDER: tuple[Reads, ...] = ("data", "checkpoint", "log")
_UNWANTED = "no rule that reads it is selected"


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
        files: The files, and folders that are one source each, by who reads them.
        requests: The data that configurations point to.
    """

    files: dict[str, list[str]] = field(default_factory=dict)
    requests: Sequence[Any] = ()

    def take(self, kind: FileKind, path: str) -> None:
        """Takes in a file."""
        self.files.setdefault(SCANNED[kind], []).append(str(Path(path)))

    def take_folder(self, path: str) -> bool:
        """Takes in a folder that is one source, though no file in it is; returns whether it is."""
        for name in SCANNED.values():
            if reader(name).recognises_folder(Path(path)):
                self.files.setdefault(name, []).append(str(Path(path)))
                return True
        return False

    def size(self) -> int:
        """Returns how many bytes there are to read."""
        named = {path for paths in self.files.values() for path in paths}
        pointed = {str(path) for request in self.requests for path in request.paths}
        return sum(map(_size, named | pointed))

    def check(self, selection: Selection, scan: Scan) -> Iterator[FileOutcome]:
        """Yields what came of every source, in a fixed order."""
        for name in _ORDER:
            paths = self.files.get(name, [])
            requests = self.requests if name == "data" else ()
            if not paths and not requests:
                continue
            rules = selection.rules(name)
            if rules:
                yield from Bench(name, rules, selection, scan).outcomes(paths, requests)
            else:
                for path in paths:
                    yield FileOutcome.left_out(path, _UNWANTED, Omission.UNRELATED)


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

    def outcomes(self, paths: Sequence[str], requests: Sequence[Any] = ()) -> Iterator[FileOutcome]:
        """Yields what came of each file of each source.

        A reader that fails may have failed over one file; the others are read without it.

        Args:
            paths: The files, and folders that are one source each.
            requests: What configurations point to.
        """
        if not paths and not requests:
            return
        done: set[str] = set()
        try:
            for source in self._opened(paths, requests):
                for outcome in self.judged(source):
                    done.add(outcome.path)
                    yield outcome
        except Exception as error:  # noqa: BLE001 - the other files have to be checked
            yield from self._again(paths, requests, done, error)
            return
        # What was handed over and read together with something else.
        yield from (FileOutcome(path) for path in paths if not _is_in(path, done))

    def _opened(self, paths: Sequence[str], requests: Sequence[Any]) -> Iterator[Source]:
        places = [Path(path) for path in paths]
        if not requests:
            return reader(self.name).open_sources(places, self.scan)
        from nanguard.check.data.data_reader import open_sources

        return open_sources(places, self.scan, requests)

    def _again(
        self, paths: Sequence[str], requests: Sequence[Any], done: set[str], error: Exception
    ) -> Iterator[FileOutcome]:
        """Yields what comes of each source alone, after one of several broke the reader."""
        if len(paths) + len(requests) == 1:
            named = paths or [str(path) for path in requests[0].paths] or [requests[0].config]
            yield from (FileOutcome.left_out(str(path), _reason(error)) for path in named)
            return
        for request in requests:
            if not all(_is_in(str(path), done) for path in request.paths):
                yield from self.outcomes([], [request])
        pointed = {str(path) for request in requests for path in request.paths}
        for path in paths:
            if not _is_in(path, done) and path not in pointed:
                yield from self.outcomes([path])

    def judged(self, source: Source) -> Iterator[FileOutcome]:
        """Yields what rules say about a source, and what became of its files."""
        broken = dict(source.not_read)
        findings, failed = judge(self.rules, source, source.path)
        kept = [f for f in findings if self.selection.applies(f.code, f.name, f.path or "")]
        whole = FileOutcome("", [Seen(f) for f in in_order(kept)], checked=False)
        whole.not_checked = [*failed, *(NotChecked(*entry) for entry in broken.items())]
        yield whole
        for path in source.read_from:
            yield FileOutcome(path, checked=path not in broken)


def _is_in(path: str, covered: set[str]) -> bool:
    return path in covered or any(str(folder) in covered for folder in Path(path).parents)


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size  # noqa: PTH116 - may be gone by now
    except OSError:
        return 0


def _reason(error: Exception) -> str:
    return error.reason if isinstance(error, SourceError) else failure(error)


Item = TypeVar("Item")
Result = TypeVar("Result")

# A worker that dies is replaced and its file read again; one that kills every worker is given up.
RETRIES = 3
_TASKS_PER_PROCESSOR = 4  # tasks under way for every processor of the cluster


def on_ray(
    work: Callable[[Item, Scan], Result],
    items: Iterable[Item],
    scan: Scan,
    *,
    files: Callable[[Item], Sequence[Path]] | None = None,
    lost: Callable[[Item, SourceError], Result] | None = None,
) -> Iterator[Result]:
    """Yields what comes of each item, in their order, from tasks of a Ray cluster.

    The cluster is the one that ``RAY_ADDRESS`` names, or one on this machine for the time of the
    check. What is read there has to be reachable there: a shared folder, or a remote path.

    Args:
        work: A function of a module.
        items: The items.
        scan: How to scan.
        files: Not needed: the cluster has limits of its own.
        lost: Returns what comes of an item that killed every worker that read it.

    Raises:
        SourceError: A file killed every worker that read it.
    """
    todo = list(items)
    if not todo:
        return
    ray = _started()
    shared = ray.put(scan.elsewhere())
    task = ray.remote(max_retries=RETRIES, num_cpus=1)(work)
    room = max(2, int(_TASKS_PER_PROCESSOR * ray.cluster_resources().get("CPU", 1)))
    waiting: deque[tuple[Item, Any]] = deque()
    try:
        for item in todo:
            waiting.append((item, task.remote(item, shared)))
            if len(waiting) >= room:
                yield _result(ray, scan, lost, *waiting.popleft())
        while waiting:
            yield _result(ray, scan, lost, *waiting.popleft())
    finally:
        for _, reference in waiting:
            ray.cancel(reference, force=True)


def ready() -> None:
    """Makes sure that Ray is there.

    Raises:
        MissingDependencyError: It is not installed.
    """
    from importlib.util import find_spec

    if find_spec("ray") is None:
        raise MissingDependencyError(
            "--engine ray needs ray, which is not installed.",
            where="nanguard check --engine ray",
            do=f"Install it: {installing('ray')}",
        )


def _started() -> Any:
    # Nobody is told that Ray is in use: a check talks to no one but the cluster.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import logging

    import ray

    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    return ray


def _result(
    ray: Any, scan: Scan, lost: Callable[[Any, SourceError], Any] | None, item: Any, reference: Any
) -> Any:
    try:
        result = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        # What the work itself raised, as it would have been raised here.
        raise error.cause if isinstance(error.cause, Exception) else error from error
    except (ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError) as error:
        killed = SourceError(
            f"it killed {RETRIES + 1} workers that read it",
            where=str(item),
            do="Check it on a machine with more memory.",
        )
        if lost is None:
            raise killed from error
        return lost(item, killed)
    if isinstance(item, Path) and item.is_file():
        scan.progress(str(item), item.stat().st_size)
    return result
