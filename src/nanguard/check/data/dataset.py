"""A data set as rules read it: its files, what they hold, and what is expected of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nanguard.check.data.labels import whole_number
from nanguard.check.data.ledger import Ledger
from nanguard.check.data.roles import Roles
from nanguard.check.data.watching import Watch
from nanguard.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nanguard.check.data.labels import Labels
    from nanguard.check.scanning import Expected


class NeedsCodeError(SourceError):
    """A file that only code of its own can read, which is never run."""


@dataclass(frozen=True, slots=True)
class Missing:
    """A file that a configuration names and that is not there.

    Attributes:
        config: The configuration.
        line: The line that names it, counted from 1.
        key: The setting, dotted.
        written: The file as it is written there.
        empty: Whether there is a folder of that name, without any data in it.
    """

    config: str
    line: int
    key: str
    written: str
    empty: bool = False


@dataclass(frozen=True)
class Request:
    """Files that belong together, and what is expected of them.

    Attributes:
        paths: The files.
        expected: What they are checked against.
        measured: Whether labels are measurements, not classes.
        config: The configuration that names them; None if none does.
        missing: Files that it names and that are not there.
        named: How many classes a list of names has; None if there is none.
        names: The file or setting that names them.
    """

    paths: tuple[Path, ...]
    expected: Expected
    measured: bool = False
    config: str | None = None
    missing: tuple[Missing, ...] = ()
    named: int | None = None
    names: str | None = None


@dataclass
class DataFile:
    """One file of a data set, read.

    Attributes:
        path: The file, as the user named it.
        format: What it is, such as ``JSON lines``.
        ledger: What it holds.
        roles: What its columns are for.
        broken: Why it cannot be read as what it is; None if it can.
        error: Why it was not looked at; None if it was.
    """

    path: str
    format: str
    ledger: Ledger = field(default_factory=Ledger)
    roles: Roles = field(default_factory=Roles)
    broken: str | None = None
    error: SourceError | None = None

    @property
    def has_lines(self) -> bool:
        """Whether records can be found by their lines."""
        return self.format in ("JSON lines", "CSV")


@dataclass
class DataSet:
    """Files that belong together, read.

    Attributes:
        files: The files.
        request: What was asked for.
    """

    files: tuple[DataFile, ...]
    request: Request

    @property
    def path(self) -> str:
        """The first file, or the configuration where there is none."""
        return self.files[0].path if self.files else str(self.request.config)

    @property
    def watch(self) -> Watch:
        """What is expected, as questions."""
        return Watch(self.request.expected, self.request.measured)

    @property
    def not_checked(self) -> list[tuple[str, str]]:
        """Files that could not be looked at, each with the reason."""
        return [(file.path, file.error.what) for file in self.files if file.error is not None]

    def histogram(self) -> dict[str | None, dict[int | str, int]]:
        """Returns how often each class occurs in all files, for each data set records name."""
        out: dict[str | None, dict[int | str, int]] = {}
        for _, labels in self.labelled():
            for label, places in labels.seen.items():
                number = whole_number(label)
                key = str(label.value) if number is None else number
                counts = out.setdefault(label.group, {})
                counts[key] = counts.get(key, 0) + places.count
        return out

    def labelled(self) -> Iterator[tuple[DataFile, Labels]]:
        """Yields the files that have labels."""
        for file in self.files:
            if file.ledger.labels is not None:
                yield file, file.ledger.labels
