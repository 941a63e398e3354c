"""Runs as their configuration files describe them: the one model that rules read."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from nanguard.check.config.key_usage import Usage
from nanguard.check.config.keys import words
from nanguard.check.config.precision import PRECISION_SETTINGS, RunPrecision, read_precision

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nanguard.check.config.document import Document, Leaf
    from nanguard.check.config.families import Family
    from nanguard.check.config.node import KeyedNode, Node

# Digits are read in one way only: "\d+\.?\d*" would try every place to cut a long number in two.
_NUMBER = re.compile(r"[-+]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?")
_SCIENTIFIC = re.compile(r"[-+]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)[eE][-+]?\d+")
NUMBERS = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?")
_ON = frozenset(("true", "yes", "on", "1", "enabled", "enable"))
_OFF = frozenset(("false", "no", "off", "0", "none", "disabled", "null", "never"))


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """One setting of a run.

    Attributes:
        name: What the setting is called in every family.
        key: Its key in the file, dotted.
        sections: The names of the sections around it in normal form, outermost first.
        document: The file it stands in.
        entry: Its key and value as they are written.
        node: The value that counts: where the entry refers to another place, what stands there.
        parent: The mapping it is an entry of.
        home: The file the value that counts stands in.
    """

    name: str
    key: str
    sections: tuple[str, ...]
    document: Document
    entry: KeyedNode
    node: Node
    parent: Node
    home: Document

    @property
    def path(self) -> str:
        """The file."""
        return self.document.path

    @property
    def line(self) -> int:
        """The line of the key, counted from 1."""
        return self.entry.line

    @property
    def column(self) -> int:
        """The column of the key, counted from 1."""
        return self.document.text.position(self.entry.start)[1]

    @property
    def span(self) -> tuple[int, int]:
        """The offsets of the value that counts."""
        return self.node.start, self.node.end

    @property
    def value(self) -> Any:
        """What the value means to the program that reads the file; a list for a sequence."""
        if self.node.kind == "sequence":
            return [item.value for item in self.node.items]
        return self.node.value if self.node.kind == "scalar" else None

    @property
    def written(self) -> str:
        """The value as it is written."""
        return self.node.raw if self.node.kind == "scalar" else str(self.value)

    @property
    def text(self) -> str:
        """The value as lower-case text; empty for what is none."""
        value = self.value
        return value.strip().lower() if isinstance(value, str) else ""

    @property
    def number(self) -> float | None:
        """The value as a number, also where it is text or a list of one; None if it is none."""
        value = self.value
        return number_of(value[0] if isinstance(value, list) and len(value) == 1 else value)

    @property
    def numbers(self) -> list[float]:
        """The numbers of a list, or of a text such as ``(0.9, 0.95)``."""
        value = self.value
        if isinstance(value, list):
            found = [number_of(item) for item in value]
            return [item for item in found if item is not None]
        if isinstance(value, str):
            return [float(item) for item in NUMBERS.findall(value)]
        return []

    @property
    def truth(self) -> bool | None:
        """The value as yes or no; None if it is neither."""
        value = self.value
        if isinstance(value, bool):
            return value
        if isinstance(value, (int, float)):
            return bool(value) if value in (0, 1) else None
        text = self.text
        return True if text in _ON else False if text in _OFF and text else None

    @property
    def is_null(self) -> bool:
        """Whether the value is left empty or null."""
        value = self.value
        return value is None or (
            isinstance(value, str) and value.strip().lower() in ("none", "null")
        )


def number_of(value: Any) -> float | None:
    """Returns a value as a number, also where it is written as text; None if it is none."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    if isinstance(value, str):
        text = value.strip()
        if text.lower() in ("inf", "+inf", "infinity", ".inf"):
            return math.inf
        if _NUMBER.fullmatch(text):
            return float(text.replace("_", ""))
    return None


def reads_as_text(node: Node) -> bool:
    """Returns whether a YAML scalar is written as a number that YAML 1.1 reads as text."""
    return (
        node.kind == "scalar"
        and node.style == "plain"
        and isinstance(node.value, str)
        and node.tag is None
        and _SCIENTIFIC.fullmatch(node.raw.strip()) is not None
    )


_ADAM = re.compile(
    r"adam|radam|ademamix|adan|(?:^|_)soap|sophia|stable_?adam|came(?:$|_)|adabelief|adopt|lamb"
)
_FREE = re.compile(r"prodigy|d_?adapt|adadelta|lbfgs|rprop|mechanic|dog$|ldog|dlion|cocob")
_ADAM_KEYS = frozenset(("betas", "beta1", "beta2", "eps"))
_SECTIONS = words("adam adamw sgd adafactor lion muon rmsprop lamb lars radam nadam adagrad")


def optimizer_of(stage: TrainingStage) -> str | None:
    """Returns the optimizer of a stage in lower case, or None if nothing tells."""
    setting = stage.get("optimizer")
    if setting is not None and setting.text:
        name = re.split(r"[.:/]", setting.text)[-1]
        return name.replace("-", "_")
    for found in stage.settings:
        named = _SECTIONS.intersection(found.sections)
        if named and found.name in ("lr", *_ADAM_KEYS):
            return sorted(named)[0]
    if any(found.name in _ADAM_KEYS for found in stage.settings):
        return "adam"
    return stage.family.optimizer


def kind_of(optimizer: str | None) -> str | None:
    """Returns the kind of an optimizer, which says what learning rates it bears.

    Returns:
        One of ``adam``, ``sgd``, ``adafactor``, ``lion``, ``muon``, ``rmsprop``, ``lars``,
        ``adagrad``, ``free`` (finds its own step), ``other``; None for None.
    """
    if optimizer is None:
        return None
    if _FREE.search(optimizer):
        return "free"
    for kind in ("adafactor", "lion", "muon", "rmsprop", "lars", "adagrad", "galore", "lamb"):
        if kind in optimizer:
            return kind
    if _ADAM.search(optimizer):
        return "adam"
    return "sgd" if "sgd" in optimizer or optimizer in ("momentum", "nesterov") else "other"


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

    entry: KeyedNode
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

    first: KeyedNode
    second: KeyedNode
    dotted: str
    parent: Node
    document: Document


@dataclass(eq=False)
class TrainingStage:
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
    def precision(self) -> RunPrecision:
        """How it computes."""
        return read_precision(self.all(*PRECISION_SETTINGS), self.partial)

    @cached_property
    def optimizer(self) -> str | None:
        """The optimizer in lower case without its module; the family's own if none is set."""
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
    stages: tuple[TrainingStage, ...]
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
    from nanguard.check.config.run_files import read_runs

    return read_runs(documents, usage or Usage())


def _weight(setting: Setting) -> tuple[int, int]:
    from nanguard.check.config.keys import role

    where = role(setting.sections)
    return (_BY_ROLE.index(where) if where in _BY_ROLE else len(_BY_ROLE), len(setting.sections))
