"""What a replay is given to do, what it answers, and how far the replays of a second run are."""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path

    from nanguard.guard.verdicts import Symptom
    from nanguard.replay.tracer.origin import Origin
    from nanguard.replay.tracer.sites import Site


@dataclass
class Task:
    """Go on from here up to a step, with something changed.

    Attributes:
        target: The step to come to, as the number of steps before it.
        trace: Whether to watch every operation.
        heal: Operations whose bad results are replaced by harmless ones.
        precision: ``float32`` or ``float64`` instead of narrower types.
        lr_factor: What every learning rate is multiplied with.
        clip: The norm that gradients are scaled down to.
        fresh_grads: Whether gradients are cleared before the first backward of each step.
        without: Samples of the batch at the target that are replaced by a good one.
        targets_only: Whether only what the model is not given is replaced.
        source: Changed source files, by path.
        further: How many steps are made with the change, with the same batch, before the one that
            is judged.
        on_good: Whether a good step is replayed instead of the target.
        folder: Where the batch of the target is saved.
        table: Whether every operation of the step is reported.
        skipped: Steps before the target that the guard kept from happening.
        look_at: An operation that is to be described, whatever the origin is.
        answer: The way back.
        progress: Where it is noted how far the replay is; None for nowhere.
    """

    target: int
    trace: bool = False
    heal: tuple[int, ...] = ()
    precision: str | None = None
    lr_factor: float = 1.0
    clip: float | None = None
    fresh_grads: bool = False
    without: tuple[int, ...] = ()
    targets_only: bool = False
    source: dict[str, str] = field(default_factory=dict)
    further: int = 0
    on_good: bool = False
    folder: str | None = None
    table: bool = False
    skipped: tuple[int, ...] = ()
    look_at: int | None = None
    answer: Connection | None = None
    progress: ReplayProgress | None = None


@dataclass(frozen=True)
class Loaded:
    """State that was bad when a module took it over.

    Attributes:
        dtype: The type it had in the file.
        infinite: Whether it held infinities.
        site: Where the script loads it.
    """

    dtype: str
    infinite: bool
    site: Site | None


# How a number moved: steps, and what it was then.
Curve = list[tuple[int, float]]


@dataclass
class Growth:
    """How the size of the parameters changed from one step to another."""

    first: float
    last: float
    update: float


@dataclass
class Facts:
    """What a traced replay found out beside the origin.

    Attributes:
        suspects: Operations that made a bad value before the origin did, as (index, line).
        samples: The samples of the batch that are at fault.
        batch_size: How many samples there are.
        lr: The largest learning rate.
        optimizer: The optimizer's class.
        eps: Its eps, if it has one.
        made: Where the script made it.
        step_site: Where the script calls it.
        backward_site: Where the script calls backward.
        model_name: What the script calls its model.
        scaler_name: What the script calls its GradScaler.
        optimizer_name: What the script calls its optimizer.
        clip_limit: The norm that the script clips its gradients to, if it does.
        autocast: The type autocast computes in, where it was on.
        half_parameters: Whether parameters are of a 16-bit type.
        schedule: Where the function begins that made the learning rate bad, if it is known.
        rate_set_in: The script's files that set a learning rate by themselves.
        schedule_state: The number that the schedule goes by and that is bad, if there is one.
        growth: How parameters changed since the start of the replay.
        losses: The losses of the steps before.
        loaded_bad: State that was bad when a module took it over, by its name.
        curves: The element farthest from zero of small parameters in the steps before, by name.
        stale_grads: Whether gradients of earlier steps were still there at backward.
        table: Every operation of the step, where it was asked for.
        notes: What else is worth knowing.
        indices: Where the samples are in the data set.
        batch_indices: Where all samples of the batch are, if the loader says so.
        path: The way of the bad value, operation by operation.
        came_in: Whether the batch was bad when a loader handed it out.
        unseen: Whether the script may have made the data bad itself, before the replay began.
    """

    suspects: list[tuple[int, str]] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    batch_size: int | None = None
    lr: float | None = None
    optimizer: str | None = None
    eps: float | None = None
    made: Site | None = None
    step_site: Site | None = None
    backward_site: Site | None = None
    model_name: str | None = None
    scaler_name: str | None = None
    optimizer_name: str | None = None
    clip_limit: float | None = None
    autocast: str | None = None
    half_parameters: bool = False
    schedule: Site | None = None
    rate_set_in: list[str] = field(default_factory=list)
    schedule_state: str | None = None
    growth: Growth | None = None
    losses: list[float] = field(default_factory=list)
    loaded_bad: dict[str, Loaded] = field(default_factory=dict)
    curves: dict[str, Curve] = field(default_factory=dict)
    stale_grads: bool = False
    table: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    batch_indices: list[int] = field(default_factory=list)
    path: list[dict[str, Any]] = field(default_factory=list)
    came_in: bool = False
    unseen: bool = False

    def blame(self, samples: list[int]) -> None:
        """Notes which samples of the batch are at fault, and where these are in the data set."""
        self.samples = samples
        known = self.batch_indices
        self.indices = [known[row] for row in samples if row < len(known)]


@dataclass
class ReplayOutcome:
    """What a replay came to.

    Attributes:
        ordinal: The step it ended at, counted over all optimizers.
        step: That step as its optimizer counts.
        symptom: What was wrong with it; None if it was finite.
        loss: Its loss.
        origin: Where the bad value came from, if it was traced.
        facts: What else was found out.
        error: Why the replay did not come to the step.
        differs: Whether it came to another loss than the run did.
    """

    ordinal: int = -1
    step: int = -1
    symptom: Symptom | None = None
    loss: float | None = None
    origin: Origin | None = None
    facts: Facts = field(default_factory=Facts)
    error: str | None = None
    differs: bool = False

    @property
    def finite(self) -> bool:
        """Whether it came to the step, and that was finite."""
        return self.error is None and self.symptom is None


# How many replays were begun, and the step that the last of them has come to.
_NUMBERS = struct.Struct("<qq")


class ReplayProgress:
    """How far the replays of a second run are: two numbers, shared with whoever waits.

    Each replay is a process of its own that may write no file and is ended at any time. A page of
    memory that belongs to a file, and that every copy inherits, costs nothing to write to.
    """

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

    @staticmethod
    def create(path: Path) -> None:
        """Makes the file, with nothing done yet."""
        path.write_bytes(bytes(_NUMBERS.size))

    @staticmethod
    def in_words(path: Path, target: int) -> str:
        """Returns how far replays are, such as ``replay 2, step 17 of 58``; empty if none began.

        Args:
            path: The file that ``create`` has made.
            target: The step that replays go up to.
        """
        replays, step = _NUMBERS.unpack(path.read_bytes())
        return f"replay {replays}, step {step} of {target}" if replays else ""
