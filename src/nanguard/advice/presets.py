"""Stable configurations to begin with: tasks, levels, and the values that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from nanguard.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

Unit = Literal["epochs", "steps"]
Three = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class PresetTask:
    """What is trained, and the numbers that keep it stable.

    Fields of three hold one number for each level: safe, balanced, fast.

    Attributes:
        about: What it is, in words.
        rates: Learning rates.
        floors: Where the schedule ends.
        clips: Norms that gradients are clipped to.
        unit: What lengths are counted in.
        length: How long the run is.
        warmups: How long the rate rises.
        saves: How often a checkpoint is written.
        accumulations: Micro-batches for each step.
        batch: Samples in a micro-batch.
        weight_decay: That of AdamW.
        beta2: How long AdamW remembers squared gradients.
        smoothing: Label smoothing; None where there are no classes.
        rate_why: Why these learning rates, and what to do about NaN.
        clip_why: Why these norms.
        plan: What to do once the first run has held, in order.
    """

    about: str
    rates: Three
    floors: Three
    clips: Three
    unit: Unit
    length: int
    warmups: tuple[int, int, int]
    saves: tuple[int, int, int]
    accumulations: tuple[int, int, int]
    batch: int
    weight_decay: float
    beta2: float
    smoothing: float | None
    rate_why: str
    clip_why: str
    plan: tuple[str, ...]


TASKS: dict[str, PresetTask] = {
    "classifier": PresetTask(
        about="a classifier of images, sequences or features, counted in epochs",
        rates=(5e-5, 1e-4, 2e-4),
        floors=(1e-6, 1e-6, 1e-6),
        clips=(0.5, 1.0, 1.0),
        unit="epochs",
        length=50,
        warmups=(5, 5, 3),
        saves=(1, 2, 5),
        accumulations=(1, 1, 1),
        batch=32,
        weight_decay=1e-4,
        beta2=0.999,
        smoothing=0.1,
        rate_why=(
            "NaN in epochs 1 to 3: go down to 1e-5 or 5e-6. NaN in epochs 10 to 20: 5e-5. Stable "
            "but slow: 1e-4. Always stable: 2e-4."
        ),
        clip_why="The first rung is 1.0; spikes that get through are a reason for 0.5.",
        plan=(
            "Train 5 epochs and look at the largest gradient norm and at the validation loss.",
            "If nothing was skipped, raise the learning rate to 1e-4, later to 2e-4.",
            "Turn on bf16 only after a run in fp32 has held.",
        ),
    ),
    "multidataset": PresetTask(
        about="one classifier head over several data sets, counted in steps",
        rates=(1e-6, 2e-6, 5e-6),
        floors=(1e-7, 2e-7, 5e-7),
        clips=(0.5, 0.5, 1.0),
        unit="steps",
        length=30_000,
        warmups=(1000, 500, 500),
        saves=(500, 1000, 1000),
        accumulations=(2, 2, 1),
        batch=16,
        weight_decay=1e-4,
        beta2=0.999,
        smoothing=0.1,
        rate_why=(
            "Begin at 1e-6, until every data set has a finite evaluation loss; then 2e-6, then "
            "5e-6. An infinite loss is a wrong label or mask, which no learning rate repairs."
        ),
        clip_why="Batches of different data sets have gradients of different size.",
        plan=(
            "Confirm the labels of every data set: all of them below its number of classes.",
            "Try 1 % of the data, then one data set at a time.",
            "Raise the learning rate from 1e-6 to 2e-6, then to 5e-6.",
            "Only then mask logits again, with -1e4, no label smoothing, never the target's class.",
        ),
    ),
    "diffusion": PresetTask(
        about="a diffusion model, in pixels or latents, counted in steps",
        rates=(1e-5, 2e-5, 5e-5),
        floors=(1e-6, 1e-6, 1e-6),
        clips=(0.5, 0.5, 1.0),
        unit="steps",
        length=50_000,
        warmups=(2000, 1000, 1000),
        saves=(500, 1000, 2000),
        accumulations=(2, 1, 1),
        batch=16,
        weight_decay=1e-4,
        beta2=0.999,
        smoothing=None,
        rate_why=(
            "Runs at 1e-4 broke after 5 % of their length, and one at 5e-5 after two hours. NaN "
            "at this rate: 5e-6, and bound the loss weights over diffusion time first (max 100)."
        ),
        clip_why="A time step near 0 or 1 can weigh a hundred times as much as another.",
        plan=(
            "Train 5000 steps and look at the loss by time step.",
            "Bound loss weights (max 100), and check that the noise schedule never reaches 0.",
            "Then raise the learning rate to 2e-5, and to 5e-5 after a whole run has held.",
        ),
    ),
    "lm": PresetTask(
        about="a language model trained from scratch, counted in steps",
        rates=(3e-5, 5e-5, 1e-4),
        floors=(3e-6, 5e-6, 1e-5),
        clips=(0.3, 0.5, 1.0),
        unit="steps",
        length=100_000,
        warmups=(2000, 2000, 2000),
        saves=(500, 1000, 1000),
        accumulations=(4, 4, 2),
        batch=8,
        weight_decay=0.01,
        beta2=0.95,
        smoothing=None,
        rate_why=(
            "A run of 900 M parameters in bf16 held for 92 000 steps at 1e-4 and never again. "
            "After NaN late in a run: 5e-5, then 3e-5, from the last good checkpoint."
        ),
        clip_why="Late spikes get through 1.0; 0.5 and 0.3 hold them. 1e6 is no clipping at all.",
        plan=(
            "Train 2000 steps beyond warm-up; the gradient norm should have settled.",
            "Raise the learning rate to 5e-5 and the norm to 0.5.",
            "1e-4 and 1.0 only with a checkpoint every 1000 steps to go back to.",
        ),
    ),
    "finetune": PresetTask(
        about="fine-tuning of a pretrained transformer, counted in epochs",
        rates=(1e-5, 2e-5, 3e-5),
        floors=(1e-6, 1e-6, 1e-6),
        clips=(0.5, 1.0, 1.0),
        unit="epochs",
        length=10,
        warmups=(1, 1, 1),
        saves=(1, 1, 1),
        accumulations=(4, 2, 1),
        batch=8,
        weight_decay=0.01,
        beta2=0.999,
        smoothing=None,
        rate_why="Pretrained weights bear 1e-5 to 3e-5. NaN in the first epoch: 5e-6.",
        clip_why="The first steps on new data have the largest gradients of the whole run.",
        plan=(
            "Train one epoch and compare with the pretrained model on the same data.",
            "If nothing was skipped, raise the learning rate to 2e-5.",
            "Take fewer micro-batches for each step last.",
        ),
    ),
}


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

    task: PresetTask
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
