"""What a family of configuration files is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nanguard.check.config.leaves import Leaf


@dataclass(frozen=True, slots=True)
class Facts:
    """What families are told apart by.

    Attributes:
        top: The keys at the root, in normal form.
        keys: Every key in the file, in normal form.
        sections: The keys of each section at the root, in normal form.
        leaves: The leaves.
        defaults: Whether the root has a list of defaults, as Hydra composes them.
    """

    top: frozenset[str]
    keys: frozenset[str]
    sections: Mapping[str, frozenset[str]]
    leaves: tuple[Leaf, ...]
    defaults: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """A family of configuration files.

    Attributes:
        name: What it is called.
        order: Families are asked in this order whether a file is theirs.
        matches: Whether a file belongs to it.
        keys: What settings keys are that mean something else elsewhere, by section and key, both
            in normal form; an empty section is the root.
        known: Its own keys, among which a stranger that looks like one of them is a slip.
        closed: Whether its reader refuses or drops keys that are not its own.
        at_root: Whether a file hands its root to that reader; None if every file does.
        script: Those of its known keys that are a script's own, and not its reader's.
        turns_text_into_numbers: Whether its reader takes ``1e-5`` for a number.
        clips: The norm it clips to where nothing is set; 0 if its recipes do without; None if it
            leaves clipping to the user.
        optimizer: The optimizer it takes where none is set.
        partial: Whether a file of it describes only a part of a run.
        adds: How it writes settings that a fix adds.
    """

    name: str
    order: int
    matches: Callable[[Facts], bool]
    keys: Mapping[tuple[str, str], str | None] = field(default_factory=dict)
    known: frozenset[str] = frozenset()
    closed: bool = False
    at_root: Callable[[Facts], bool] | None = None
    script: frozenset[str] = frozenset()
    turns_text_into_numbers: bool = False
    clips: float | None = None
    optimizer: str | None = None
    partial: bool = False
    adds: Mapping[str, str] = field(default_factory=dict)
