"""The checkpoints of a run: where they are, and which can be resumed from, the newest first."""

from __future__ import annotations

import glob
import os
import re
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from nanguard.check.checkpoint.checkpoint_reader import as_run, looks_of, read_units
from nanguard.check.checkpoint.run_checkpoints import (
    CHECKPOINT_HEAD_BYTES,
    files_in,
    read_run_in_part,
    recognises,
    units_of,
)
from nanguard.check.checkpoint.tensor_roles import TensorRole, role_of_file
from nanguard.check.scan import Scan
from nanguard.incident import NAME as INCIDENT
from nanguard.run.recovering.templates import is_option

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from nanguard.check.checkpoint.checkpoint import Checkpoint
    from nanguard.check.checkpoint.run_checkpoints import Unit

    Stamp = tuple[tuple[str, int, int], ...]

# Bad checkpoints that are read one after the other before the first bad one is searched.
_IN_A_ROW = 6


class CheckpointVerdict(str, Enum):
    """What is known of a checkpoint."""

    GOOD = "good"
    DAMAGED = "damaged"
    POISONED = "with bad numbers"
    UNKNOWN = "not checked"
    UNREAD = "not read"


@dataclass(frozen=True, slots=True)
class Judged:
    """A checkpoint of the run.

    Attributes:
        path: The file or folder.
        step: The step or epoch it is of; None if nothing says so.
        stamp: How its files looked.
        verdict: Whether it can be resumed from.
    """

    path: str
    step: int | None
    stamp: Stamp
    verdict: CheckpointVerdict = CheckpointVerdict.UNREAD

    @property
    def written(self) -> float:
        """When the last of its files was written."""
        return max((time for _, _, time in self.stamp), default=0) / 1e9

    @property
    def key(self) -> tuple[str, Stamp]:
        """What tells it from what was written over it."""
        return self.path, self.stamp

    def in_words(self) -> str:
        """Returns its name, with the step where the name does not say it."""
        return self.path if self.step is None else f"{self.path} (step {self.step})"


@dataclass(frozen=True, slots=True)
class Audited:
    """The checkpoints of a run, oldest first.

    Attributes:
        all: Every one.
        looked_at: Where they were looked for.
    """

    all: tuple[Judged, ...]
    looked_at: str

    @property
    def good(self) -> list[Judged]:
        """Those that can be resumed from, the newest first."""
        return [one for one in reversed(self.all) if one.verdict is CheckpointVerdict.GOOD]

    @property
    def bad(self) -> list[Judged]:
        """Those that cannot, oldest first."""
        return [
            one
            for one in self.all
            if one.verdict in (CheckpointVerdict.DAMAGED, CheckpointVerdict.POISONED)
        ]

    def in_words(self) -> str:
        """Returns what was found, in a few words."""
        if not self.all:
            return f"no checkpoint in {self.looked_at}"
        counts = {
            verdict: sum(one.verdict is verdict for one in self.all)
            for verdict in CheckpointVerdict
        }
        parts = [f"{count} {verdict.value}" for verdict, count in counts.items() if count]
        return f"{counted(len(self.all), 'checkpoint')}: {', '.join(parts)}"


@dataclass(slots=True)
class Auditor:
    """Reads checkpoints, and remembers those it has read.

    Attributes:
        places: Where they are.
        scan: How to read them.
    """

    places: Places
    scan: Scan = field(default_factory=Scan)
    _known: dict[tuple[str, Stamp], Judged] = field(default_factory=dict)

    def look(self, wanted: int, without: Collection[tuple[str, Stamp]] = ()) -> Audited:
        """Returns the checkpoints, read from the newest back until enough of them are good.

        Args:
            wanted: How many good ones are looked for.
            without: Those that are not to be resumed from.
        """
        units = self._run()
        judged = {str(unit.path): _plain(unit) for unit in units}
        todo = [unit for unit in units if judged[str(unit.path)].key not in without]
        unfinished = self._unfinished(todo)
        good = bad = 0
        while todo and good < wanted:
            if bad >= _IN_A_ROW and len(todo) > _IN_A_ROW:
                todo = self._search(todo, judged)
                bad = 0
                continue
            unit = todo.pop()
            one = self._judged(unit)
            if str(unit.path) in unfinished:
                one = replace(one, verdict=CheckpointVerdict.DAMAGED)
            judged[str(unit.path)] = one
            good += one.verdict is CheckpointVerdict.GOOD
            bad = 0 if one.verdict is CheckpointVerdict.GOOD else bad + 1
        kept = [one for one in judged.values() if one.key not in without]
        return Audited(tuple(kept), self.places.in_words())

    def judge(self, path: str) -> Judged | None:
        """Returns what is known of one checkpoint; None if there is none of that name."""
        for units in units_of(files_in([Path(path)]) if Path(path).exists() else []):
            for unit in units:
                if unit.path == Path(path):
                    return self._judged(unit)
        return None

    def _run(self) -> list[Unit]:
        """Returns the checkpoints of the run, oldest first; of several kinds the fullest."""
        runs = units_of(self.places.files())
        if len(runs) < 2:
            return runs[0] if runs else []
        return max(runs, key=_weight)

    def _unfinished(self, units: Sequence[Unit]) -> set[str]:
        """Returns the folders that lack what the others have."""
        if not any(unit.path.is_dir() for unit in units):
            return set()
        outlines = as_run(read_units(units, self.scan, False))  # noqa: FBT003
        return {one.path for one in outlines if one.damaged}

    def _judged(self, unit: Unit) -> Judged:
        plain = _plain(unit)
        known = self._known.get(plain.key)
        if known is None:
            (read,) = read_units([unit], self.scan, True)  # noqa: FBT003
            known = self._known[plain.key] = _as_judged(read, plain)
        return known

    def _search(self, units: list[Unit], judged: dict[str, Judged]) -> list[Unit]:
        """Finds where a long run turns bad by halving; returns what is left to be looked at."""

        def read(some: Sequence[Unit], numbers: bool) -> list[Checkpoint]:  # noqa: FBT001
            return read_units(some, self.scan, numbers)

        end = 0
        for at, (unit, one) in enumerate(zip(units, read_run_in_part(units, read), strict=True)):
            result = judged[str(unit.path)] = _as_judged(one, _plain(unit))
            if one.scanned:
                self._known[result.key] = result
            if result.verdict is CheckpointVerdict.GOOD:
                end = at + 1
        return units[:end]


def _weight(run: list[Unit]) -> tuple[bool, bool, int, float]:
    """Orders kinds of checkpoints: numbered ones first, and those that hold the most."""
    aside = role_of_file(run[-1].path) not in (
        None,
        TensorRole.WEIGHT,
    )  # an optimizer's file beside it
    stamps = [looks_of(unit) for unit in run]
    largest = max(sum(size for _, size, _ in stamp) for stamp in stamps)
    return not aside, run[0].step is not None, largest, _plain(run[-1]).written


def counted(number: int, thing: str) -> str:
    """Returns how many of a thing there are, in words."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _as_judged(read: Checkpoint, plain: Judged) -> Judged:
    verdict = CheckpointVerdict.UNKNOWN
    if read.damaged:
        verdict = CheckpointVerdict.DAMAGED
    elif not read.scanned:
        verdict = CheckpointVerdict.UNREAD
    elif read.good:
        verdict = CheckpointVerdict.GOOD
    elif read.bad:
        verdict = CheckpointVerdict.POISONED
    return Judged(plain.path, read.step, plain.stamp, verdict)


def _plain(unit: Unit) -> Judged:
    """Returns a checkpoint of which only the names of its files are known."""
    return Judged(str(unit.path), unit.step, looks_of(unit))


# Folders in which nobody keeps the checkpoints of a run.
_NEVER = ("node_modules", "site-packages", "dist-packages", "__pycache__", "wandb", "venv")
_OUTPUT = re.compile(
    r"-{1,2}(?:out|output|save|ckpt|checkpoint|checkpoints|run|log|exp|experiment|work|result"
    r"|results|model|weights|resume|default[-_]root)"
    r"(?:[-_](?:dir|directory|path|folder|from|out|to|root|checkpoint|ckpt))*"
)
MAX_DEPTH = 6
MAX_FILES = 50_000


@dataclass(frozen=True, slots=True)
class Places:
    """Where checkpoints are looked for.

    Attributes:
        named: A folder, a file or a pattern of the user's; None to find them.
        since: When the first attempt began: of what is found, only newer files count.
        folders: Folders that the command names, and the one it runs in.
    """

    named: str | None
    since: float
    folders: tuple[Path, ...] = field(default=())

    @classmethod
    def of(cls, named: str | None, command: Sequence[str], since: float) -> Places:
        """Returns the places for a command."""
        folders = () if named else tuple(dict.fromkeys([*_told_by(command), Path()]))
        return cls(named, since, folders)

    def files(self) -> list[Path]:
        """Returns the files of checkpoints; what incidents keep of a batch is none."""
        return [path for path in self._files() if not (path.parent / INCIDENT).exists()]

    def _files(self) -> list[Path]:
        if self.named is None:
            return [path for path in _written(self.folders, self.since) if _recognised(path)]
        if Path(self.named).is_dir():
            return files_in([Path(self.named)])
        paths = [Path(path) for path in sorted(glob.glob(self.named, recursive=True))]  # noqa: PTH207 - absolute, too
        inside = [path for path in paths if path.is_dir() or _recognised(path)]
        return files_in(inside)

    def in_words(self) -> str:
        """Returns what was looked at."""
        if self.named is not None:
            return self.named
        shown = ", ".join(str(folder) for folder in self.folders)
        return f"{shown} (files written since the start; --checkpoints names another place)"


def _told_by(command: Sequence[str]) -> Iterator[Path]:
    """Yields the folders that the options of a command name as places to write to."""
    for at, word in enumerate(command):
        option, equals, value = word.partition("=")
        if not equals:
            value = command[at + 1] if at + 1 < len(command) else ""
        named = _OUTPUT.fullmatch(option.lower()) or not is_option(option)
        if not value or is_option(value) or not (named and (equals or is_option(option))):
            continue
        path = Path(value)
        folder = path if not path.suffix else path.parent
        if folder.is_dir() or not path.suffix:
            yield folder


def _written(folders: Sequence[Path], since: float) -> Iterator[Path]:
    """Yields files that were written since a time; folders that hold none are left out early."""
    seen: set[str] = set()
    count = 0
    for folder in folders:
        for here, below, names in os.walk(folder):
            real = os.path.realpath(here)
            deep = len(Path(here).parts) - len(folder.parts) >= MAX_DEPTH
            below[:] = [] if deep else sorted(name for name in below if _may_hold(name))
            if real in seen:
                continue
            seen.add(real)
            for name in sorted(names):
                count += 1
                if count > MAX_FILES:
                    return
                path = Path(here, name)
                if _is_new(path, since):
                    yield path


def _may_hold(name: str) -> bool:
    return not name.startswith(".") and name not in _NEVER


def _is_new(path: Path, since: float) -> bool:
    try:
        return path.stat().st_mtime >= since
    except OSError:
        return False


def _recognised(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return path.is_file() and recognises(path, file.read(CHECKPOINT_HEAD_BYTES))
    except OSError:
        return False
