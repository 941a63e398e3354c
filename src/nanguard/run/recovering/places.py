"""Where the checkpoints of a command are: where the user says, or where it has written some."""

from __future__ import annotations

import glob
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from nanguard.check.checkpoint.run_checkpoints import CHECKPOINT_HEAD_BYTES, files_in, recognises
from nanguard.incident import NAME as INCIDENT
from nanguard.run.recovering.templates import is_option

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
