"""Who writes incidents for a guard: what it is given, what it may ask for, where it is found."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from nanguard.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch.optim import Optimizer

    from nanguard.guard.parts import Parts
    from nanguard.guard.policy import Decision, Trouble
    from nanguard.guard.verdicts import Symptom

# Explaining a step needs the tracer and replays. Both lie above the
# guard and use it, so that the guard can only know them by name.
_RECORDER = "nanguard.run.guarded"
# Set for every process below `nanguard run`, which has a folder for incidents of its own.
_LAUNCHED = "NANGUARD_RUN"


@dataclass(frozen=True, slots=True)
class BadStep:
    """A bad step, as the guard reports it.

    Attributes:
        step: Its number.
        symptom: What was seen of it.
        decision: What the guard does about it.
        alone: Whether this rank knows that the fault is its own.
        batches: Its batches with their indices.
    """

    step: int
    symptom: Symptom
    decision: Decision
    alone: bool
    batches: list[tuple[int, Any]]


class Recorder(Protocol):
    """Writes incidents, and explains them by replaying steps.

    A replay runs in this process, from what the step began with, or in a second run of the whole
    command, with the guard in it.

    Attributes:
        replaying: Whether the guard's loop is being replayed: then the guard has no say.
    """

    replaying: bool

    def between(self, step: int) -> None:
        """Called when a step is about to begin."""

    def launched(self, step: int) -> None:
        """Called when a step was handed to the device, or held back."""

    def verdict(self, step: int) -> bool | None:
        """Returns whether a step is held back, in a second run; None in the run itself."""

    def apply(self, optimizers: Sequence[Optimizer], call: Callable[[], None]) -> None:
        """Makes a good step."""

    def held_back(self, optimizers: Sequence[Optimizer]) -> None:
        """Called when a bad step is over."""

    def with_known(self, trouble: Trouble) -> Trouble:
        """Returns what the ladder has to know, with what the run has met before."""

    def bad(self, bad: BadStep) -> None:
        """Writes the incident of a bad step."""

    def culprit(self) -> str:
        """Returns what went wrong most often, in a sentence; empty if nothing was explained."""

    def judge_again(self, optimizers: Sequence[Optimizer]) -> None:
        """Ends a replay where the guard would have made its step."""

    def close(self) -> None:
        """Ends it."""


def is_replaying(recorder: Recorder | None) -> bool:
    """Returns whether what a guard sees right now is only a replay."""
    return recorder is not None and recorder.replaying


def recorder_for(
    incidents: str | Path | None, parts: Parts, *, quarantine: bool = False
) -> Recorder | None:
    """Returns who writes the incidents of a run; None if nobody wants any.

    Args:
        incidents: The folder for incidents.
        parts: The run.
        quarantine: Whether samples that were found bad are left out of the loaders.
    """
    if incidents is None and _LAUNCHED not in os.environ:
        if quarantine:
            raise UsageError(
                "quarantine needs incidents: only a step that was replayed shows which sample is "
                "at fault.",
                where="Guard(quarantine=True)",
                do='Have them written: Guard(..., run_dir="runs/night", incidents=True, '
                "quarantine=True).",
            )
        return None
    made: Recorder | None = importlib.import_module(_RECORDER).recorder(
        incidents, parts, quarantine=quarantine
    )
    return made
