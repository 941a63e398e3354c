"""The work of a scan as tasks of a Ray cluster: each file is read where there is room for it."""

from __future__ import annotations

import logging
import os
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nanguard.errors import MissingDependencyError, SourceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from nanguard.check.scanning import Scan

Item = TypeVar("Item")
Result = TypeVar("Result")

# A worker that dies is replaced and its file read again; one that kills every worker is given up.
RETRIES = 3
_AHEAD = 4  # tasks under way for every processor of the cluster


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
    room = max(2, int(_AHEAD * ray.cluster_resources().get("CPU", 1)))
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
            do="Install it: pip install 'nanguard[ray]'",
        )


def _started() -> Any:
    # Nobody is told that Ray is in use: a check talks to no one but the cluster.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
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
