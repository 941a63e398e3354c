"""Runs as their configuration files describe them: the one model that rules read."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from nanguard.check.config.precision import PRECISION_SETTINGS, Precision, read_precision
from nanguard.check.config.usage import Usage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nanguard.check.config.document import Document
    from nanguard.check.config.families import Family
    from nanguard.check.config.leaves import Leaf
    from nanguard.check.config.node import Entry, Node
    from nanguard.check.config.settings import Setting

_BY_ROLE = ("optimizer", "trainer", None, "scheduler", "model", "data")


@dataclass(frozen=True, slots=True, eq=False)
class Misspelling:
    """A key that is almost one that is known.

    Attributes:
        entry: The key as it is written.
        right: The key it looks like.
        dotted: Where it stands.
        document: The file.
        closed: Whether its reader is known, and drops or refuses a key that is not its own.
    """

    entry: Entry
    right: str
    dotted: str
    document: Document
    closed: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Repeated:
    """A key that stands twice in one mapping.

    Attributes:
        first: Its earlier entry, which readers forget.
        second: Its later entry.
        dotted: Where it stands.
        parent: The mapping.
        document: The file.
    """

    first: Entry
    second: Entry
    dotted: str
    parent: Node
    document: Document


@dataclass(eq=False)
class Stage:
    """One part of a run with settings of its own: a stage, or one of several optimizers.

    Attributes:
        scope: The section it is, outermost key first; empty if the run has but one part.
        levels: Its settings by how near they stand to it, its own first.
        family: The family of the run's own file.
        traits: What is being trained.
        partial: The files that a launcher or DeepSpeed reads.
        usage: What the project's code reads.
    """

    scope: tuple[str, ...]
    levels: tuple[tuple[Setting, ...], ...]
    family: Family
    traits: frozenset[str]
    partial: frozenset[str] = frozenset()
    usage: Usage = field(default_factory=Usage)

    def all(self, *names: str) -> list[Setting]:
        """Returns the settings of these names that stand nearest."""
        for level in self.levels:
            found = [setting for setting in level if setting.name in names]
            if found:
                return found
        return []

    def get(self, *names: str) -> Setting | None:
        """Returns the setting of these names that counts most; None if there is none."""
        found = self.all(*names)
        if not found:
            return None
        return min(found, key=_weight)

    def number(self, *names: str) -> float | None:
        """Returns a setting's value as a number; None if it has none."""
        setting = self.get(*names)
        return None if setting is None else setting.number

    def truth(self, *names: str) -> bool | None:
        """Returns a setting's value as yes or no; None if it is neither."""
        setting = self.get(*names)
        return None if setting is None else setting.truth

    @cached_property
    def precision(self) -> Precision:
        """How it computes."""
        return read_precision(self.all(*PRECISION_SETTINGS), self.partial)

    @cached_property
    def optimizer(self) -> str | None:
        """The optimizer in lower case without its module; the family's own if none is set."""
        from nanguard.check.config.optimizers import optimizer_of

        return optimizer_of(self)

    @property
    def settings(self) -> Iterator[Setting]:
        """Every setting it can see, its own first."""
        for level in self.levels:
            yield from level


@dataclass(eq=False)
class RunConfig:
    """One run, read from one file or from several that belong together.

    Attributes:
        documents: The files it was read from, the run's own first.
        owned: The files whose findings are this run's to report.
        family: The family of the run's own file.
        families: The family of each file, by path.
        stages: Its parts; one for most runs.
        leaves: Everything that has a value, in the order of the files.
        repeated: Keys that stand twice in one mapping.
        misspelled: Keys that are almost ones that are known.
        turns_text_into_numbers: Files whose reader takes ``1e-5`` for a number, by path.
        usage: What the project's code reads.
        parsed: Files that go to a program whose keys are known, and not to one of the user's.
    """

    documents: tuple[Document, ...]
    owned: frozenset[str]
    family: Family
    families: dict[str, Family]
    stages: tuple[Stage, ...]
    leaves: tuple[Leaf, ...]
    repeated: tuple[Repeated, ...] = ()
    misspelled: tuple[Misspelling, ...] = ()
    turns_text_into_numbers: frozenset[str] = field(default_factory=frozenset)
    usage: Usage = field(default_factory=Usage)
    parsed: frozenset[str] = field(default_factory=frozenset)

    @property
    def path(self) -> str:
        """The run's own file."""
        return self.documents[0].path


def read_project(documents: Sequence[Document], usage: Usage | None = None) -> list[RunConfig]:
    """Returns the runs that files given together describe.

    Files that do not configure a training run are left out, unless a run is composed of them.

    Args:
        documents: The files.
        usage: What the project's code reads, where there is code.
    """
    from nanguard.check.config.project import read_runs

    return read_runs(documents, usage or Usage())


def _weight(setting: Setting) -> tuple[int, int]:
    from nanguard.check.config.names import role

    where = role(setting.sections)
    return (_BY_ROLE.index(where) if where in _BY_ROLE else len(_BY_ROLE), len(setting.sections))
