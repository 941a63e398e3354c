"""How far the replays of a second run are: two numbers that its copies share with who waits.

Each replay is a process of its own that may write no file and is ended at any time. A page of
memory that belongs to a file, and that every copy inherits, costs nothing to write to, and whoever
waits can read it.
"""

from __future__ import annotations

import mmap
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

# How many replays were begun, and the step that the last of them has come to.
_NUMBERS = struct.Struct("<qq")


class ReplayProgress:
    """What the copies of a second run write to."""

    def __init__(self, path: Path) -> None:
        """Opens what ``create`` has made.

        Args:
            path: The file.
        """
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _NUMBERS.size)

    def begin_replay(self) -> None:
        """Counts a replay, which is at its beginning."""
        replays, _step = _NUMBERS.unpack(self._memory)
        _NUMBERS.pack_into(self._memory, 0, replays + 1, 0)

    def at_step(self, step: int) -> None:
        """Notes that the replay has come to a step."""
        replays, _step = _NUMBERS.unpack(self._memory)
        _NUMBERS.pack_into(self._memory, 0, replays, step)


def create(path: Path) -> None:
    """Makes the file, with nothing done yet."""
    path.write_bytes(bytes(_NUMBERS.size))


def in_words(path: Path, target: int) -> str:
    """Returns how far the replays are, such as ``replay 2, step 17 of 58``; empty if none began.

    Args:
        path: The file that ``create`` has made.
        target: The step that replays go up to.
    """
    replays, step = _NUMBERS.unpack(path.read_bytes())
    return f"replay {replays}, step {step} of {target}" if replays else ""
