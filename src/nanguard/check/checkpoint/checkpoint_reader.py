"""Checkpoints from paths: files that belong together, read all at once or as a run writes them."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanguard.check.checkpoint.byte_ranges import DamagedError, FileBlob, TooLargeError
from nanguard.check.checkpoint.checkpoint import (
    Checkpoint,
    CheckpointFile,
    CheckpointRun,
    Job,
    read_job,
    read_part,
    step_of,
)
from nanguard.check.checkpoint.pickle_reader import read_pickle
from nanguard.check.checkpoint.run_checkpoints import (
    DISTRIBUTED_ENDING,
    METADATA,
    Unit,
    files_in,
    is_one_source,
    read_run_in_part,
    recognises,
    shard_of,
    units_of,
)
from nanguard.check.checkpoint.tensors import Call, Global, PickleDict
from nanguard.check.checkpoint.torch_file import beyond_weights_only
from nanguard.check.paths import INDEX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from nanguard.check.scan import Scan
    from nanguard.errors import SourceError

    Looks = tuple[tuple[str, int, int], ...]

# A file that is not whole and was not written to for this many looks will not become whole.
PATIENCE = 5


@dataclass(slots=True)
class _Seen:
    """What is known of a checkpoint.

    Attributes:
        looks: How its files looked last.
        unchanged: For how many looks they have not changed.
        read: What it holds; None as long as it is not whole.
        reported: Whether it was reported.
    """

    looks: Looks
    unchanged: int = 0
    read: Checkpoint | None = None
    reported: bool = False


@dataclass(slots=True)
class CheckpointWatcher:
    """Looks at a folder again and again.

    Attributes:
        folder: The folder.
        scan: How to scan.
    """

    folder: Path
    scan: Scan
    _seen: dict[Path, _Seen] = field(default_factory=dict)

    def look(self) -> list[Checkpoint]:
        """Returns the checkpoints that have become whole, or have given up becoming so."""
        if not self.folder.is_dir():
            return []
        new: list[Checkpoint] = []
        there: set[Path] = set()
        for units in units_of(files_in([self.folder])):
            there.update(unit.path for unit in units)
            fresh = [one for one in map(self._followed, units) if one is not None]
            if fresh:
                known = [self._seen[unit.path].read for unit in units]
                as_run([one for one in known if one is not None])
                new += fresh
        for path in set(self._seen) - there:
            del self._seen[path]
        return new

    def _followed(self, unit: Unit) -> Checkpoint | None:
        """Returns a checkpoint if it is time to tell of it."""
        looks = looks_of(unit)
        seen = self._seen.get(unit.path)
        if seen is None or seen.looks != looks:
            self._seen[unit.path] = _Seen(looks)
            return None
        seen.unchanged += 1
        if seen.reported:
            return None
        (outline,) = read_units([unit], self.scan, False)  # noqa: FBT003
        if outline.damaged and seen.unchanged < PATIENCE:
            return None
        (seen.read,) = read_units([unit], self.scan, True)  # noqa: FBT003
        seen.reported = True
        return seen.read


def looks_of(unit: Unit) -> Looks:
    """Returns what changes when a checkpoint is written: names, sizes and times of its files."""
    found = []
    for file in unit.files:
        try:
            about = file.stat()
        except OSError:
            continue
        found.append((str(file), about.st_size, about.st_mtime_ns))
    return tuple(found)


_GETATTR = "builtins.getattr"
_ENUMERATION = "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING"


def _only_members(calls: Sequence[Call]) -> bool:
    """Returns whether all that is got by name are members of an enumeration of torch's.

    Python 3.11.0 to 3.11.3 write them so.
    """
    got = [call.args for call in calls if call.full == _GETATTR]
    return bool(got) and all(
        isinstance(args, tuple)
        and len(args) == 2
        and isinstance(args[0], Global)
        and args[0].full == _ENUMERATION
        and isinstance(args[1], str)
        and not args[1].startswith("_")
        for args in got
    )


def jobs_of(folder: Path, files: Sequence[Path], scan: Scan) -> tuple[list[Job], CheckpointFile]:
    """Returns what is to be read of a folder, and what its own description says.

    Args:
        folder: The folder.
        files: The files of it.
        scan: How to scan.
    """
    about = CheckpointFile(str(folder / METADATA))
    shards = {file.name: file for file in files if file.name.endswith(DISTRIBUTED_ENDING)}
    slices: dict[str, list[tuple[str, int, int]]] = {}
    try:
        with scan.at_hand(folder / METADATA) as here, FileBlob(here, about.path) as blob:
            about.size = blob.size
            found = read_pickle(blob)
        names = [n for n in found.names if n != _GETATTR or not _only_members(found.calls)]
        about.needs = beyond_weights_only(names, METADATA)
        slices = _slices(found.value)
    except FileNotFoundError:
        about.path = str(folder)
        about.damage.append(f"{METADATA}, which is written last, is missing")
    except DamagedError as error:
        about.damage.append(str(error))
    except (OSError, TooLargeError) as error:
        about.not_checked = str(error)
    about.damage += [f"{name} is missing" for name in slices if name not in shards]
    jobs = [
        Job(shards[name], slices=tuple(sorted(parts, key=lambda part: part[1])))
        for name, parts in sorted(slices.items())
        if name in shards
    ]
    return jobs, about


def _slices(value: object) -> dict[str, list[tuple[str, int, int]]]:
    """Returns what is in each file: names, offsets and sizes."""
    state = value.state if isinstance(value, Call) else None
    listed = state.get("storage_data") if isinstance(state, PickleDict) else None
    if not isinstance(listed, (PickleDict, Call)):
        raise DamagedError("the description of the checkpoint does not say where tensors are")
    found: dict[str, list[tuple[str, int, int]]] = {}
    for key, info in listed.pairs or []:
        name = _field(key, "fqn", 0)
        file, offset = _field(info, "relative_path", 0), _field(info, "offset", 1)
        size = _field(info, "length", 2)
        if not isinstance(file, str) or Path(file).name != file:
            raise DamagedError(f"a tensor is said to be in {str(file)[:60]!r}")
        if not isinstance(offset, int) or not isinstance(size, int) or offset < 0 or size < 0:
            raise DamagedError(f"{str(name)[:60]} has no place")
        if _field(info, "transform_descriptors", 3):
            raise TooLargeError("its tensors are stored in a transformed way")
        found.setdefault(file, []).append((str(name)[:300], offset, size))
    return found


def _field(made: object, name: str, index: int) -> object:
    """Returns a field of an object, which may be in its state or among its arguments."""
    if not isinstance(made, Call):
        return None
    state = made.state
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], PickleDict):
        state = state[1]
    if isinstance(state, PickleDict):
        return state.get(name)
    if isinstance(state, (list, tuple)) and index < len(state):
        return state[index]
    args = made.args if isinstance(made.args, tuple) else ()
    return args[index] if index < len(args) else None


__all__ = ["open_sources", "read_part", "recognises", "recognises_folder", "watch"]

MAX_INDEX = 1 << 25
# A run with more checkpoints and more bytes than this is searched, not read as a whole.
MANY_CHECKPOINTS = 40
MANY_BYTES = 1 << 35


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
    watcher = CheckpointWatcher(folder, scan)
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
        if len(units) > MANY_CHECKPOINTS and _bytes(units) > MANY_BYTES:
            found = read_run_in_part(units, lambda some, numbers: read_units(some, scan, numbers))
        else:
            found = read_units(units, scan, numbers=True)
        yield from as_run(found)


def as_run(checkpoints: list[Checkpoint]) -> list[Checkpoint]:
    """Returns checkpoints that know of each other; oldest first."""
    if len(checkpoints) > 1:
        run = CheckpointRun(checkpoints)
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


def _lost(job: Job, error: SourceError) -> CheckpointFile:
    return CheckpointFile(str(job.path), not_checked=error.what)


def _plan(unit: Unit, scan: Scan) -> tuple[list[Job], list[CheckpointFile]]:
    """Returns what is to be read for a checkpoint, and what is known without."""
    jobs: list[Job] = []
    known: list[CheckpointFile] = []
    folders: dict[Path, list[Path]] = {}
    for file in unit.files:
        if file.name == METADATA or file.name.endswith(DISTRIBUTED_ENDING):
            folders.setdefault(file.parent, []).append(file)
        elif not file.name.endswith(INDEX):
            jobs.append(Job(file))
    for folder, files in folders.items():
        more, about = jobs_of(folder, files, scan)
        jobs += more
        known.append(about)
    return jobs, known


def _checkpoint(unit: Unit, parts: list[CheckpointFile], numbers: bool) -> Checkpoint:  # noqa: FBT001
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


def _notice_unfinished(run: CheckpointRun) -> None:
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
