"""A checkpoint as rules read it, and the run it belongs to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nanguard.check.checkpoint.roles import Role
from nanguard.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.checkpoint.part import Measured, Part

# Weights beyond this are not learned any more, whatever their type.
EXPLODED = 1e6
# Half of what fp16 can hold.
NEARLY_HALF = 32768
_COUNTERS = ("global_step", "step", "steps", "iteration", "iter", "it", "num_updates", "epoch")


@dataclass(slots=True, eq=False)
class Checkpoint:
    """One checkpoint: a file, or a folder of files that belong together.

    Attributes:
        path: The file or folder.
        name: Its own name.
        step: The step or epoch it is of; None if nothing says so.
        parts: What is in its files.
        missing: What should be there and is not.
        scanned: Whether its numbers were read; not all are where there are hundreds.
        run: The run it belongs to; None if it stands alone.
        files: Every file it was read from.
    """

    path: str
    name: str
    step: int | None
    parts: list[Part]
    missing: list[tuple[str, str]] = field(default_factory=list)
    scanned: bool = True
    run: Run | None = field(default=None, repr=False)
    files: list[str] = field(default_factory=list)

    @property
    def error(self) -> SourceError | None:
        """Why it was not checked, or not all of it."""
        if not self.scanned:
            what = "Its numbers were not read: the run has too many checkpoints to read them all."
            return SourceError(what, where=self.path, do="Name it alone to have it checked.")
        for part in self.parts:
            why = part.not_checked
            if why is None and part.unread:
                why = f"{part.unread:,} tensors are stored in a way that is not known"
            if why is not None:
                do = "Look at the file with the library that wrote it."
                return SourceError(f"Not checked: {why}.", where=part.path, do=do)
        return None

    @property
    def damaged(self) -> bool:
        """Whether something is missing."""
        return bool(self.missing) or any(part.damage for part in self.parts)

    @property
    def good(self) -> bool:
        """Whether a run can be resumed from it."""
        if self.damaged or not self.scanned or any(part.not_checked for part in self.parts):
            return False
        return not any(part.poisoned or _bad_scalars(part) for part in self.parts) and not any(
            True for _ in self.exploded()
        )

    @property
    def bad(self) -> bool:
        """Whether a run cannot be resumed from it."""
        read = self.scanned and not any(part.not_checked for part in self.parts)
        return self.damaged or (read and not self.good)

    def exploded(self) -> Iterator[tuple[Part, Measured]]:
        """Yields weights that are far too large to be learned."""
        for part in self.parts:
            for tensor in part.tensors:
                if tensor.role not in (Role.WEIGHT, Role.EMA) or tensor.poisoned:
                    continue
                if _explodes(tensor):
                    yield part, tensor


@dataclass(slots=True, eq=False)
class Run:
    """Checkpoints of one run, oldest first.

    Attributes:
        checkpoints: The checkpoints.
    """

    checkpoints: list[Checkpoint]

    @property
    def last_good(self) -> Checkpoint | None:
        """The newest checkpoint that a run can be resumed from."""
        return next((one for one in reversed(self.checkpoints) if one.good), None)

    @property
    def bad(self) -> list[Checkpoint]:
        """The checkpoints that a run cannot be resumed from."""
        return [one for one in self.checkpoints if one.bad]

    @property
    def first_bad(self) -> Checkpoint | None:
        """The checkpoint from which on none is good."""
        good = self.last_good
        rest = self.checkpoints[self.checkpoints.index(good) + 1 :] if good else self.checkpoints
        return next((one for one in rest if one.bad), None)


def step_of(parts: list[Part]) -> int | None:
    """Returns the step that the files of a checkpoint say; the most telling counter wins."""
    for name in _COUNTERS:
        for part in parts:
            if part.counters.get(name, -1) >= 0:
                return part.counters[name]
    return None


def bad_scalars(part: Part) -> list[tuple[str, float]]:
    """Returns plain numbers of optimizers and scalers that are not finite.

    Infinity is a common setting for "no limit"; NaN is none for anything.
    """
    found = []
    for name, role, value in part.scalars:
        if role not in (Role.OPTIMIZER, Role.SCALER):
            continue
        leaf = name.rsplit(".", 1)[-1]
        if value != value or leaf in ("lr", "scale", "_scale", "cur_scale"):
            found.append((name, value))
    return found


def _bad_scalars(part: Part) -> bool:
    return bool(bad_scalars(part))


def _explodes(tensor: Measured) -> bool:
    largest = tensor.numbers.largest
    if largest <= NEARLY_HALF or tensor.large_meant:
        return False
    if tensor.dtype == "float16":  # where nothing can be much larger
        return tensor.name.endswith("weight")
    return largest > EXPLODED
