"""What a scan of data, checkpoints or logs is told, and what it tells while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

# Called with the file and the bytes that were read since the last call.
Progress = Callable[[str, int], None]


def _nobody(path: str, read: int) -> None:
    """Takes no note of progress."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What data is checked against.

    Attributes:
        label_key: The column, key or array that holds labels; None to find it.
        classes: How many classes there are; None if not known.
        groups: How many classes each data set has, by its name.
        group_key: The column or key that names the data set of a record.
        vocabulary: How many tokens there are; None if not known.
        ignored: Labels that are meant to be skipped, such as -100.
    """

    label_key: str | None = None
    classes: int | None = None
    groups: dict[str, int] = field(default_factory=dict)
    group_key: str | None = None
    vocabulary: int | None = None
    ignored: tuple[int, ...] = (-100,)


@dataclass(frozen=True, slots=True)
class Scan:
    """How files are scanned.

    Attributes:
        expected: What data is checked against.
        progress: Called while files are read.
        threads: How many threads may work at once.
    """

    expected: Expected = Expected()
    progress: Progress = _nobody
    threads: int = 2
