"""What scripts that start a training say: which files go together, and what they override."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from nanguard.check.config.names import normal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_ENDINGS = (".sh", ".bash", ".zsh", ".slurm", ".sbatch", ".pbs")
_LARGEST = 256 << 10  # bytes; a script that starts something is shorter
_STARTS = re.compile(
    r"\b(accelerate\s+launch|deepspeed|torchrun|python[\d.]*|srun|llamafactory-cli)\b"
)
_WORD = re.compile(r"[\w./{}$\-]+")
_CONFIGURATIONS = (".yaml", ".yml", ".json", ".toml")
_OPTION = re.compile(r"--([A-Za-z][\w.\-]*)(?:[ =]([^\s\\]+))?")
_ASSIGNED = re.compile(r"(?:^|\s)\+{0,2}([A-Za-z_][\w.]*)=([^\s\\]+)")


@dataclass(frozen=True, slots=True)
class Launch:
    """One command that starts a training.

    Attributes:
        script: The script it stands in.
        files: The names of the configurations it mentions, without their folders.
        options: What it sets itself, by the last part of each key in normal form.
    """

    script: str
    files: frozenset[str]
    options: dict[str, str] = field(default_factory=dict)

    def names(self, path: str) -> bool:
        """Returns whether the command mentions a file."""
        return PurePath(path).name in self.files


def is_launcher(path: str) -> bool:
    """Returns whether a file may start a training, by its name."""
    return path.endswith(_ENDINGS)


def launches_in(paths: Iterable[str]) -> Iterator[Launch]:
    """Yields the commands of scripts that start something with a configuration."""
    for path in paths:
        try:
            with Path(path).open(encoding="utf-8", errors="replace") as file:
                content = file.read(_LARGEST)
        except OSError:
            continue
        for command in content.replace("\\\n", " ").split("\n"):
            if command.lstrip().startswith("#") or not _STARTS.search(command):
                continue
            words = (word for word in _WORD.findall(command) if word.endswith(_CONFIGURATIONS))
            files = frozenset(PurePath(word).name for word in words)
            if files:
                yield Launch(path, files, _options(command))


def _options(command: str) -> dict[str, str]:
    found = [*_OPTION.findall(command), *_ASSIGNED.findall(command)]
    return {normal(key.rpartition(".")[2]): value for key, value in found}
