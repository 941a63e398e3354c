"""What launch scripts and the folder itself show."""

from __future__ import annotations

import re
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from nanguard.advice.checklist.facts import Trace
from nanguard.errors import SourceError
from nanguard.source.files import decode, read_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

_LIMIT = 256 << 10
_ENDINGS = frozenset((".sh", ".bash", ".zsh", ".slurm", ".sbatch", ".pbs", ".mk"))
_NAMES = frozenset(("Makefile", "makefile", "justfile", "Justfile", "Dockerfile", "Procfile"))
_GUARDED = re.compile(r"\bnanguard\s+run\b|-m\s+nanguard\s+run\b")
_SEVERAL = re.compile(
    r"\b(accelerate\s+launch|deepspeed\s+\S|torchrun\b|torch\.distributed\.(run|launch)\b)"
)


def is_script(path: str) -> bool:
    """Returns whether a file is one that starts others, by its name."""
    pure = PurePath(path)
    return pure.suffix.lower() in _ENDINGS or pure.name in _NAMES


def script_traces(path: str) -> Iterator[Trace]:
    """Yields what a script shows; nothing if it cannot be read."""
    try:
        content = decode(path, read_bytes(path, _LIMIT), python=False).content
    except SourceError:
        return
    for number, line in enumerate(content.splitlines(), start=1):
        if line.lstrip().startswith("#"):
            continue
        if _GUARDED.search(line):
            yield Trace("guard", path, number, "nanguard run starts the training")
        if _SEVERAL.search(line):
            yield Trace("several-ranks", path, number, "starts several ranks")


def history_traces(root: str) -> Iterator[Trace]:
    """Yields where versions of a project are kept."""
    folder = Path(root).resolve()
    for place in (folder, *folder.parents):
        if (place / ".git").exists():
            yield Trace(
                "history", str(place / ".git"), None, "the project is under version control"
            )
            return
    if (folder / ".nanguard" / "configs").is_dir():
        where = str(folder / ".nanguard" / "configs")
        yield Trace("history", where, None, "changed configurations are kept")
