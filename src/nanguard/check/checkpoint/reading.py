"""Checkpoints from paths: files that belong together, read all at once, judged as a run."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanguard.check.checkpoint.bisecting import read_run_in_part
from nanguard.check.checkpoint.checkpoint import Checkpoint, Run, step_of
from nanguard.check.checkpoint.distributed import ENDING, METADATA, jobs_of
from nanguard.check.checkpoint.inert import DamagedError
from nanguard.check.checkpoint.names import shard_of
from nanguard.check.checkpoint.part import Job, Part, read_job, read_part
from nanguard.check.checkpoint.recognition import recognises
from nanguard.check.checkpoint.units import Unit, files_in, is_one_source, units_of
from nanguard.check.kinds import INDEX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from nanguard.check.scanning import Scan
    from nanguard.errors import SourceError

__all__ = ["open_sources", "read_part", "recognises", "recognises_folder", "watch"]

MAX_INDEX = 1 << 25
# A run with more checkpoints and more bytes than this is searched, not read as a whole.
MANY = 40
MUCH = 1 << 35


def recognises_folder(path: Path) -> bool:
    """Returns whether a folder is one checkpoint, or the checkpoints of one run."""
    return is_one_source(path)


def watch(
    folder: Path,
    on_new: Callable[[Checkpoint], None],
    *,
    scan: Scan,
    every: float = 2.0,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Tells of every new checkpoint in a folder, once it is whole, until it is stopped.

    Args:
        folder: The folder of a run, which need not be there yet.
        on_new: Called with each checkpoint; its run holds those seen before.
        scan: How to scan.
        every: How many seconds to wait between two looks.
        stop: Asked after every look whether to end.
    """
    from nanguard.check.checkpoint.watching import Watcher

    watcher = Watcher(folder, scan)
    while True:
        for checkpoint in watcher.look():
            on_new(checkpoint)
        if stop():
            return
        time.sleep(every)


def open_sources(paths: Sequence[Path], scan: Scan) -> Iterator[Checkpoint]:
    """Yields the checkpoints that files and folders make up.

    Args:
        paths: Files and folders that were found.
        scan: How to scan.
    """
    for units in units_of(files_in(paths)):
        if len(units) > MANY and _bytes(units) > MUCH:
            found = read_run_in_part(units, lambda some, numbers: read_units(some, scan, numbers))
        else:
            found = read_units(units, scan, numbers=True)
        yield from as_run(found)


def as_run(checkpoints: list[Checkpoint]) -> list[Checkpoint]:
    """Returns checkpoints that know of each other; oldest first."""
    if len(checkpoints) > 1:
        run = Run(checkpoints)
        for one in checkpoints:
            one.run = run
        _notice_unfinished(run)
    return checkpoints


def read_units(units: Sequence[Unit], scan: Scan, numbers: bool) -> list[Checkpoint]:  # noqa: FBT001
    """Reads some checkpoints, several files at once.

    Args:
        units: The files of each.
        scan: How to scan.
        numbers: Whether numbers are read, or only what files say about themselves.
    """
    plans = [_plan(unit, scan) for unit in units]
    jobs = [replace(job, numbers=numbers) for plan, _ in plans for job in plan]
    parts = scan.each(read_job, jobs, files=lambda job: [job.path], lost=_lost)
    found = []
    for unit, (plan, known) in zip(units, plans, strict=True):
        read = [next(parts) for _ in plan]
        found.append(_checkpoint(unit, [*read, *known], numbers))
    return found


def _lost(job: Job, error: SourceError) -> Part:
    return Part(str(job.path), not_checked=error.what)


def _plan(unit: Unit, scan: Scan) -> tuple[list[Job], list[Part]]:
    """Returns what is to be read for a checkpoint, and what is known without."""
    jobs: list[Job] = []
    known: list[Part] = []
    folders: dict[Path, list[Path]] = {}
    for file in unit.files:
        if file.name == METADATA or file.name.endswith(ENDING):
            folders.setdefault(file.parent, []).append(file)
        elif not file.name.endswith(INDEX):
            jobs.append(Job(file))
    for folder, files in folders.items():
        more, about = jobs_of(folder, files, scan)
        jobs += more
        known.append(about)
    return jobs, known


def _checkpoint(unit: Unit, parts: list[Part], numbers: bool) -> Checkpoint:  # noqa: FBT001
    step = unit.step
    if step is None:
        step = step_of(parts)
    return Checkpoint(
        str(unit.path),
        unit.path.name,
        step,
        parts,
        missing=_missing_shards(unit),
        scanned=numbers,
        files=[str(file) for file in unit.files],
    )


def _missing_shards(unit: Unit) -> list[tuple[str, str]]:
    """Returns the parts of a whole that are not there, each with the file that tells."""
    there = {file.name for file in unit.files}
    lost: dict[str, str] = {}
    unread: list[tuple[str, str]] = []
    for file in unit.files:
        if file.name.endswith(INDEX):
            try:
                listed = _listed(file)
            except DamagedError as error:
                unread.append((str(file), str(error)))
                continue
            for name in listed - there:
                lost.setdefault(name, str(file))
        shard = shard_of(file.name)
        if shard is not None and shard[2] <= 10_000:
            stem, _, count = shard
            for number in range(1, count + 1):
                name = f"{stem}-{number:05d}-of-{count:05d}{file.suffix}"
                if name not in there and not (file.parent / name).exists():
                    lost.setdefault(name, str(file.parent))
    return [*unread, *((place, f"{name} is missing") for name, place in sorted(lost.items()))]


def _listed(index: Path) -> set[str]:
    """Returns the files that an index names and that are not there.

    Raises:
        DamagedError: It is no index.
    """
    try:
        if index.stat().st_size > MAX_INDEX:
            raise DamagedError(f"the index is larger than {MAX_INDEX >> 20} MB")
        found: Any = json.loads(index.read_bytes())
        names = set(map(str, found["weight_map"].values()))
    except OSError as error:
        raise DamagedError(f"the index cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise DamagedError("the index is no JSON; it may be cut off") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedError("the index does not say where tensors are") from error
    # Only names of files beside the index are looked at.
    return {name for name in names if Path(name).name == name and not _exists(index.parent / name)}


def _exists(path: Path) -> bool:
    """Returns whether there is a file; a name that no file can have is the name of none."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _notice_unfinished(run: Run) -> None:
    """Marks folders without weights in a run whose other folders have them."""
    having = [one for one in run.checkpoints if any(map(_is_weights, one.files))]
    for one in run.checkpoints:
        alone = one not in having and len(one.files) > 0 and Path(one.path).is_dir()
        if alone and len(having) >= 2 and not one.damaged:
            name = Path(next(file for file in having[0].files if _is_weights(file))).name
            one.missing.append((one.path, f"{name} is missing, which other checkpoints have"))


def _is_weights(file: str) -> bool:
    name = Path(file).name
    return name.startswith(("model", "pytorch_model", "adapter_model", "mp_rank_", "__"))


def _bytes(units: Sequence[Unit]) -> int:
    total = 0
    for unit in units:
        for file in unit.files:
            try:
                total += file.stat().st_size
            except OSError:
                continue
    return total
