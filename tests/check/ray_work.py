"""Work for the tests of Ray, in a module of its own that workers can import."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from nanguard.errors import SourceError

if TYPE_CHECKING:
    from pathlib import Path

    from nanguard.check.scan import Scan


def size_after_a_kill(path: Path, scan: Scan) -> tuple[str, int]:
    """Returns the size of a file; the first worker that reads the fourth dies in the middle."""
    mark = path.with_suffix(".killed")
    if path.name == "3.bin" and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return path.name, path.stat().st_size


def size_but_one(path: Path, scan: Scan) -> int:
    """Returns the size of a file; one is broken."""
    if path.name == "5.bin":
        raise SourceError("it is broken", where=str(path), do="Mend it.")
    return path.stat().st_size
