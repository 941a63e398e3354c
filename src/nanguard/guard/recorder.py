"""Who writes incidents for a guard: what it is told, what it may ask for, where it is found."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch.optim import Optimizer

    from nanguard.guard.parts import Parts
    from nanguard.guard.policy import Decision

# Explaining a step needs the tracer and the launcher's copies of a process. Both lie above the
# guard and use it, so that the guard can only know them by name.
_RECORDER = "nanguard.launch.guarded"
# Set for every process below `nanguard run`, which has a folder for incidents of its own.
_LAUNCHED = "NANGUARD_RUN"


@dataclass(frozen=True, slots=True)
class Symptoms:
    """What was seen of a bad step.

    Attributes:
        where: ``loss``, ``gradient``, ``parameter``, ``optimizer state`` or ``buffer``.
        kind: ``nan``, ``inf`` or ``spike``.
        loss: The loss.
        grad_norm: The gradient norm.
        terms: The named loss terms.
        names: The tensors that are bad, by name.
        limit: What would have been usual, for a spike.
        scale: The loss scale, where there is one.
    """

    where: str
    kind: str
    loss: float
    grad_norm: float
    terms: dict[str, float] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    limit: float | None = None
    scale: float | None = None


@dataclass(frozen=True, slots=True)
class BadStep:
    """A bad step, as the guard tells it.

    Attributes:
        step: Its number.
        symptoms: What was seen of it.
        decision: What the guard does about it.
        alone: Whether this rank knows that the fault is its own.
        batches: Its batches with their indices.
        streams: The random streams as they were before it.
        watched: Whether the guard can give its batches out again.
        searched: Whether an optimizer evaluated the loss by itself, several times.
    """

    step: int
    symptoms: Symptoms
    decision: Decision
    alone: bool
    batches: list[tuple[int, Any]]
    streams: dict[str, Any]
    watched: bool
    searched: bool


class Recorder(Protocol):
    """Writes incidents, and explains them by replaying steps.

    A replay may run in a copy of this process, which goes on from an earlier moment with the
    guard in it, or in this process, with batches that are given out again.
    """

    def between(self, step: int) -> None:
        """Hears that a step is about to begin; a copy of the process may go on from here."""

    def verdict(self, step: int) -> bool | None:
        """Returns whether a step is held back, in a copy that replays; None in the run itself."""

    def apply(self, optimizers: Sequence[Optimizer], call: Callable[[], None]) -> None:
        """Makes a good step."""

    def held_back(self, optimizers: Sequence[Optimizer]) -> None:
        """Hears that a bad step is over."""

    def bad(self, bad: BadStep) -> None:
        """Writes the incident of a bad step."""

    def again(self) -> tuple[int, Any] | None:
        """Returns a batch that is to be given out for a replay, with its index."""

    def leave(self) -> None:
        """Ends replays in the run itself, as its loop was left."""

    def judge_again(self, optimizers: Sequence[Optimizer]) -> bool:
        """Looks at a step that is replayed in the run itself; returns whether it is one."""

    def close(self) -> None:
        """Waits for explanations that are being worked on."""


def recorder_for(incidents: str | Path | None, parts: Parts) -> Recorder | None:
    """Returns who writes the incidents of a run; None if nobody wants any.

    Args:
        incidents: The folder for incidents.
        parts: The run.
    """
    if incidents is None and _LAUNCHED not in os.environ:
        return None
    made: Recorder | None = importlib.import_module(_RECORDER).recorder(incidents, parts)
    return made
