"""Which files are one checkpoint, and which checkpoints are one run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nanguard.check.checkpoint.distributed import ENDING, METADATA
from nanguard.check.checkpoint.names import (
    is_last,
    is_leftover,
    is_step_folder,
    shard_of,
    step_in,
    template,
)
from nanguard.check.checkpoint.recognition import recognises
from nanguard.check.kinds import INDEX

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

MAX_FILES = 100_000
MAX_DEPTH = 5
HEAD = 1 << 16
_TOGETHER = frozenset(
    {"optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt", "scheduler.bin"}
)
_RANKS = ("mp_rank_", "zero_pp_rank_", "bf16_zero_pp_rank_")


@dataclass(frozen=True, slots=True)
class Unit:
    """The files of one checkpoint.

    Attributes:
        path: The file or folder.
        files: Its files.
        step: The step its name says.
    """

    path: Path
    files: tuple[Path, ...]
    step: int | None


def files_in(paths: Iterable[Path]) -> list[Path]:
    """Returns the files of checkpoints among paths and in folders among them."""
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            found.update(dict.fromkeys(_inside(path)))
        else:
            found[path] = None
        if len(found) >= MAX_FILES:
            break
    return list(found)


def units_of(files: Sequence[Path]) -> list[list[Unit]]:
    """Returns runs, each a list of checkpoints in their order; most runs are of one.

    Args:
        files: All files that were found.
    """
    together: dict[Path, list[Path]] = {}
    beside: dict[Path, set[str]] = {}
    for file in files:
        beside.setdefault(file.parent, set()).add(file.name)
    for file in files:
        together.setdefault(_unit_path(file, beside[file.parent]), []).append(file)
    units = [
        Unit(path, tuple(sorted(members)), step_in(path.name))
        for path, members in sorted(together.items())
        if not is_leftover(path.name)
    ]
    return _runs(units)


def is_one_source(folder: Path) -> bool:
    """Returns whether a folder is one checkpoint or one run."""
    try:
        names = {entry.name: entry.is_dir() for entry in _entries(folder)}
    except OSError:
        return False
    files = {name for name, is_folder in names.items() if not is_folder}
    if METADATA in files or any(name.endswith((ENDING, *INDEX)) for name in files):
        return True
    if any(shard_of(name) or name.startswith(_RANKS) for name in files):
        return True
    steps = [name for name, is_folder in names.items() if is_folder and is_step_folder(name)]
    if any(_holds_any(folder / name) for name in steps[:3]):
        return True
    inside = [Path(folder, name) for name in files if step_in(name) is not None]
    kept = [path for path in inside if _recognised(path)]
    if len({template(path.name) for path in kept}) < len(kept):
        return True
    return is_step_folder(folder.name) and any(_recognised(folder / name) for name in files)


def _unit_path(file: Path, names: set[str]) -> Path:
    """Returns the file or folder that is the checkpoint a file belongs to."""
    steps = [folder for folder in list(file.parents)[:MAX_DEPTH] if is_step_folder(folder.name)]
    if steps:
        whole = steps[0]
        for outer in steps[1:]:  # a folder of the same step around it is the same checkpoint
            whole = outer if step_in(outer.name) == step_in(whole.name) else whole
        return whole
    if file.name == METADATA or file.name.endswith((ENDING, *INDEX)) or shard_of(file.name):
        return file.parent
    if file.name.startswith(_RANKS):
        return file.parent
    if names & _TOGETHER and step_in(file.name) is None:
        return file.parent
    return file


def _runs(units: list[Unit]) -> list[list[Unit]]:
    groups: dict[tuple[Path, str], list[Unit]] = {}
    alone: list[list[Unit]] = []
    for unit in units:
        if unit.step is None:
            alone.append([unit])
        else:
            groups.setdefault((unit.path.parent, template(unit.path.name)), []).append(unit)
    runs = [sorted(group, key=_order) for group in groups.values()]
    long = {group[0].path.parent: group for group in runs if len(group) > 1}
    rest = []
    for (unit,) in alone:
        run = long.get(unit.path.parent) or long.get(unit.path)
        if run is not None and (is_last(unit.path.name) or run is long.get(unit.path)):
            run.append(unit)
        else:
            rest.append([unit])
    return sorted([*runs, *rest], key=lambda run: run[0].path)


def _order(unit: Unit) -> tuple[int, str]:
    return unit.step or 0, unit.path.name


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return sorted((e for e, _ in zip(entries, range(MAX_FILES), strict=False)), key=_name)


def _name(entry: os.DirEntry[str]) -> str:
    return entry.name


def _inside(folder: Path) -> Iterator[Path]:
    """Yields the files of a run's folder: those in it, and those of checkpoints below it."""
    whole = is_one_source(folder)
    todo = [(folder, 0)]
    while todo:
        here, depth = todo.pop()
        try:
            entries = _entries(here)
        except OSError:
            continue
        for entry in entries:
            path = here / entry.name
            if entry.is_dir(follow_symlinks=False):
                below = depth > 0 or not whole or is_step_folder(entry.name)
                if depth < MAX_DEPTH and below:
                    todo.append((path, depth + 1))
            elif entry.is_file() and _recognised(path):
                yield path


def _recognised(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return recognises(path, file.read(HEAD))
    except OSError:
        return False


def _holds_any(folder: Path) -> bool:
    return next(_inside(folder), None) is not None
