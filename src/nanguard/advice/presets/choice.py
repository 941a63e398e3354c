"""What the user asks for, and the values that follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanguard.advice.presets.tasks import TASKS
from nanguard.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nanguard.advice.presets.tasks import Task

LEVELS = ("safe", "balanced", "fast")
PRECISIONS = ("fp32", "bf16", "fp16")
# How many steps an epoch is taken to have, where a family counts in the other unit.
EPOCH = 1000

# The languages of every family, the one it is written in by default first.
FAMILIES: dict[str, tuple[str, ...]] = {
    "plain": ("yaml", "toml", "json"),
    "hf": ("yaml", "json"),
    "accelerate": ("yaml",),
    "deepspeed": ("json",),
    "lightning": ("yaml",),
    "launch": ("yaml",),
}
_USUAL_PRECISION = {"safe": "fp32", "balanced": "bf16", "fast": "bf16"}
_SCALE_POWERS = {"safe": 10, "balanced": 14, "fast": 16}
_ON_BAD = {"safe": "rollback", "balanced": "skip", "fast": "skip"}


@dataclass(frozen=True, slots=True)
class Choice:
    """One preset out of all there are.

    Attributes:
        family: Who reads the configuration.
        level: How careful it is.
        precision: What is computed in; empty for what the level takes by itself.
        task: What is trained.
        form: The language; empty for the family's own.
    """

    family: str = "plain"
    level: str = "safe"
    precision: str = ""
    task: str = "classifier"
    form: str = ""

    def __post_init__(self) -> None:
        _known("family", self.family, FAMILIES)
        _known("level", self.level, LEVELS)
        _known("precision", self.precision, (*PRECISIONS, ""))
        _known("task", self.task, TASKS)
        _known(f"format for {self.family}", self.form, (*FAMILIES[self.family], ""))

    @property
    def values(self) -> Values:
        """The values of the preset."""
        precision = self.precision or _USUAL_PRECISION[self.level]
        return Values(TASKS[self.task], self.task, self.level, precision)

    @property
    def language(self) -> str:
        """The language it is written in."""
        return self.form or FAMILIES[self.family][0]


@dataclass(frozen=True, slots=True)
class Values:
    """The values of a preset, whatever family they are written for.

    Attributes:
        task: The numbers of the task.
        name: What the task is called.
        level: How careful it is.
        precision: What is computed in.
    """

    task: Task
    name: str
    level: str
    precision: str

    @property
    def at(self) -> int:
        """Where the level stands in the rows of a task."""
        return LEVELS.index(self.level)

    @property
    def lr(self) -> float:
        """The highest learning rate."""
        return self.task.rates[self.at]

    @property
    def floor(self) -> float:
        """The learning rate at the end."""
        return self.task.floors[self.at]

    @property
    def clip(self) -> float:
        """The norm gradients are clipped to."""
        return self.task.clips[self.at]

    @property
    def warmup(self) -> int:
        """How long the learning rate rises, in the task's unit."""
        return self.task.warmups[self.at]

    @property
    def warmup_ratio(self) -> float:
        """The part of the run in which the learning rate rises."""
        return self.warmup / self.task.length

    @property
    def save(self) -> int:
        """How often a checkpoint is written, in the task's unit."""
        return self.task.saves[self.at]

    @property
    def accumulation(self) -> int:
        """Micro-batches for each step."""
        return self.task.accumulations[self.at]

    @property
    def by_epochs(self) -> bool:
        """Whether lengths are counted in epochs."""
        return self.task.unit == "epochs"

    def steps(self, length: int) -> int:
        """Returns a length of the task in steps."""
        return length * EPOCH if self.by_epochs else length

    @property
    def scale_power(self) -> int:
        """The loss scale that fp16 begins with, as a power of two."""
        return _SCALE_POWERS[self.level]

    @property
    def on_bad(self) -> str:
        """What the guard does first about a bad step."""
        return _ON_BAD[self.level]


def _known(what: str, given: str, names: Iterable[str]) -> None:
    if given not in names:
        known = [name for name in names if name]
        raise UsageError(
            f"there is no {what} {given!r}.",
            where="nanguard preset",
            do=f"Give one of {', '.join(known)}.",
        )
