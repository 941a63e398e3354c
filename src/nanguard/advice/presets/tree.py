"""A configuration before it is written: keys, values, and what is said about each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

Scalar = bool | int | float | str


@dataclass(frozen=True, slots=True)
class Line:
    """A key with a value.

    Attributes:
        key: The key.
        value: The value.
        note: Why it is so, and when to change it.
    """

    key: str
    value: Scalar | tuple[Scalar, ...]
    note: str


@dataclass(frozen=True, slots=True)
class Section:
    """A key with further keys below it.

    Attributes:
        key: The key.
        members: What is below it.
        note: What the section is for.
        listed: Whether it is a list with this one member.
    """

    key: str
    members: tuple[Line | Section, ...]
    note: str = ""
    listed: bool = False


@dataclass(frozen=True, slots=True)
class Config:
    """A whole configuration.

    Attributes:
        header: What it is, paragraph by paragraph.
        members: What stands at its root.
    """

    header: tuple[str, ...]
    members: tuple[Line | Section, ...]

    def notes(self) -> Iterator[tuple[str, str]]:
        """Yields every dotted key there is something to say about, and what."""
        yield from _notes(self.members, "")


def _notes(members: tuple[Line | Section, ...], before: str) -> Iterator[tuple[str, str]]:
    for member in members:
        dotted = f"{before}{member.key}"
        if member.note:
            yield dotted, member.note
        if isinstance(member, Section):
            yield from _notes(member.members, f"{dotted}.")
