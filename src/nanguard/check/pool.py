"""Many files at once: in this process if they are few, in several if they are many."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, ClassVar

from nanguard.check.files import check_path
from nanguard.check.kinds import FileKind
from nanguard.check.outcome import FileOutcome
from nanguard.errors import SourceError
from nanguard.source.files import NOTEBOOK_LIMIT, PYTHON_LIMIT, read_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import ProcessPoolExecutor

    from nanguard.check.cache import Cache
    from nanguard.check.code.project import Project
    from nanguard.check.engine import Plan
    from nanguard.check.selection import Selection

    Job = tuple[str, FileKind]
    Batch = Sequence[Job]

_WORTH_IT = 400_000  # bytes; below, other processes cost more than they save
_BATCH = 16
_CACHED_FROM = 4  # files; below, reading the cache costs more than it saves
_DIED = "the process that checked it died"


def check_files(files: Batch, plan: Plan, project: Project | None = None) -> Iterator[FileOutcome]:
    """Yields what came of each file of Python code or notebook, in no fixed order.

    Args:
        files: The files, each with what it is taken for.
        plan: How they are checked.
        project: The files they may import from.
    """
    if plan.cache is None or len(files) < _CACHED_FROM:
        yield from _told(_checked(files, plan, project), 0, len(files), plan)
        return
    from nanguard.check.cache import Cache

    cache = Cache(plan.cache, plan.selection)
    keys = {path: _key(cache, path, kind) for path, kind in files}
    kept = {path: cache.get(key, path) for path, key in keys.items()}
    left = [job for job in files if kept[job[0]] is None]
    yield from (outcome for outcome in kept.values() if outcome is not None)
    for outcome in _told(_checked(left, plan, project), len(files) - len(left), len(files), plan):
        if all(entry.reason != _DIED for entry in outcome.not_checked):
            cache.put(keys[outcome.path], outcome)
        yield outcome
    cache.save()


def _told(
    outcomes: Iterator[FileOutcome], done: int, total: int, plan: Plan
) -> Iterator[FileOutcome]:
    """Yields outcomes, and tells how many there were."""
    for number, outcome in enumerate(outcomes, start=done + 1):
        if plan.progress is not None:
            plan.progress(number, total)
        yield outcome


def _key(cache: Cache, path: str, kind: FileKind) -> str:
    """Returns what the outcome of a file is kept under; empty if it cannot be read."""
    limit = NOTEBOOK_LIMIT if kind is FileKind.NOTEBOOK else PYTHON_LIMIT
    try:
        return cache.key(path, read_bytes(path, limit))
    except SourceError:
        return ""


def _checked(files: Batch, plan: Plan, project: Project | None) -> Iterator[FileOutcome]:
    workers = min(plan.jobs or processors(), len(files))
    if workers <= 1 or (not plan.jobs and _size(files) < _WORTH_IT):
        for path, kind in files:
            yield check_path(path, kind, plan.selection, project)
        return
    yield from _in_processes(files, plan, workers, project)


def processors() -> int:
    """Returns how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _size(files: Batch) -> int:
    total = 0
    for path, _ in files:
        try:
            total += os.stat(path).st_size  # noqa: PTH116 - a Path for every file of a tree is slow
        except OSError:
            continue
    return total


def _in_processes(
    files: Batch, plan: Plan, workers: int, project: Project | None
) -> Iterator[FileOutcome]:
    """Yields outcomes from other processes; a file that kills its process is reported."""
    left = dict(files)
    size = max(1, min(_BATCH, len(files) // (4 * workers)))
    batches = [files[i : i + size] for i in range(0, len(files), size)]
    for outcome in _round(batches, plan, workers, project):
        left.pop(outcome.path, None)
        yield outcome
    # After a crash nobody knows whose fault it was: what is left goes one by one.
    for job in list(left.items()):
        alone = list(_round([[job]], plan, 1, project))
        yield alone[0] if alone else FileOutcome.left_out(job[0], _DIED)


def _round(
    batches: Sequence[Batch], plan: Plan, workers: int, project: Project | None
) -> Iterator[FileOutcome]:
    """Yields outcomes until everything is done or a process dies."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from concurrent.futures.process import BrokenProcessPool

    # Forked processes have the rules already; elsewhere forking is not safe.
    how = "fork" if sys.platform.startswith("linux") else "spawn"
    plan.selection.rules("code")
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context(how), initializer=_begin, initargs=(project,)
    )
    try:
        futures = [pool.submit(_batch, batch, plan.selection) for batch in batches]
        for future in as_completed(futures):
            try:
                yield from future.result()
            except BrokenProcessPool:
                continue
        pool.shutdown()
    except BaseException:  # Ctrl-C, too, and it goes on
        _abandon(pool)
        raise


def _abandon(pool: ProcessPoolExecutor) -> None:
    """Ends the processes of a check that is broken off."""
    for process in list((pool._processes or {}).values()):
        process.terminate()
    # Its thread is waited for: Python, ending at the same moment, would trip over a closed pipe.
    pool.shutdown(cancel_futures=True)


def _batch(files: Batch, selection: Selection) -> list[FileOutcome]:
    return [check_path(path, kind, selection, _Worker.project) for path, kind in files]


class _Worker:
    """What a process that checks files keeps from one batch to the next."""

    project: ClassVar[Project | None] = None


def _begin(project: Project | None) -> None:
    """Takes over the project, and leaves Ctrl-C to the process that waits for this one."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _Worker.project = project
