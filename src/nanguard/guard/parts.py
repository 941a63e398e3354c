"""Puts a guard together from what the user gives it, down to who writes its incidents."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from nanguard.errors import UsageError
from nanguard.guard import events
from nanguard.guard.batches import Keeper
from nanguard.guard.gate import Gate
from nanguard.guard.journal import Journal
from nanguard.guard.models import (
    as_models,
    as_optimizers,
    buffer_registries,
    check_finite,
    devices_of,
    refuse_plateau,
    trained,
)
from nanguard.guard.optimizers import LossScaling
from nanguard.guard.ranks import Ranks
from nanguard.guard.rng import RandomStreams
from nanguard.guard.unchanged import Average, Unchanged
from nanguard.guard.verdicts import Verdicts
from nanguard.record import TRACKERS
from nanguard.snapshots.manager import GUARD, Recovery
from nanguard.snapshots.training_state import (
    BUFFERS,
    Buffers,
    OptimizerPart,
    Parameters,
    SchedulerPart,
    TrainingState,
)
from nanguard.trackers import trackers_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import nn
    from torch.optim import Optimizer

    from nanguard.guard.journal import Event
    from nanguard.guard.models import Models, Optimizers
    from nanguard.guard.policy import Decision, Trouble
    from nanguard.guard.rng import Stream
    from nanguard.guard.verdicts import Symptom
    from nanguard.settings import Settings
    from nanguard.snapshots.training_state import Part

SNAPSHOTS = "snapshots"


@dataclass(slots=True)
class Parts:
    """What a guard works with. Lane -1 stands for all optimizers, the others for one each."""

    settings: Settings
    models: list[nn.Module]
    optimizers: list[Optimizer]
    schedulers: list[Any]
    scheduler_every: Literal["step", "epoch"]
    devices: list[torch.device]
    lag: int
    gate: Gate
    ranks: Ranks
    scaling: LossScaling
    average: Average | None
    streams: RandomStreams
    unchanged: Unchanged
    verdicts: Verdicts
    keeper: Keeper
    journal: Journal
    run_dir: Path | None
    recorder: Recorder | None = None


def assemble(
    model: Models,
    optimizer: Optimizers,
    *,
    scheduler: Any,
    scheduler_every: Literal["step", "epoch"],
    scaler: Any,
    ema: Any,
    run_dir: str | Path | None,
    incidents: str | Path | bool | None,
    quarantine: bool,
    trackers: Sequence[str] | None,
    generators: Sequence[Stream],
    on_event: Callable[[Event], None] | None,
    settings: Settings,
) -> Parts:
    """Checks what the user gave and builds the parts of a guard around it."""
    models = as_models(model)
    optimizers = as_optimizers(optimizer, models)
    check_finite(trained(models, optimizers))
    schedulers = _as_list(scheduler)
    if scheduler_every == "step":
        refuse_plateau(schedulers)
    devices = devices_of(optimizers)
    lag = settings.lag if settings.lag is not None else 2 * (devices[0].type == "cuda")
    scaling = LossScaling(scaler)
    average = None if ema is None else Average(ema, models)
    ranks = Ranks(models, together=settings.ranks == "together", scaled=scaling.active)
    streams = RandomStreams(devices, generators)
    lanes = [-1, *range(len(optimizers))] if len(optimizers) > 1 else [-1]
    folder = None if run_dir is None else Path(run_dir)
    place = _incidents_folder(folder, wanted=incidents)
    parts = Parts(
        settings=settings,
        models=models,
        optimizers=optimizers,
        schedulers=schedulers,
        scheduler_every=scheduler_every,
        devices=devices,
        lag=lag,
        gate=Gate(devices[0]),
        ranks=ranks,
        scaling=scaling,
        average=average,
        streams=streams,
        unchanged=Unchanged(models, optimizers, schedulers, streams, scaling, average),
        verdicts=Verdicts(settings, lag=lag),
        keeper=Keeper(trial=lag + 2 if lag else 0, late=lag > 0),
        journal=Journal(folder, first=ranks.first, on_event=on_event),
        run_dir=folder,
    )
    for lane in lanes:
        parts.verdicts.add_lane(lane, lag=lag, adversarial=len(lanes) > 1)
    if ranks.first:
        parts.journal.trackers = trackers_for(
            trackers,
            None if folder is None else folder / TRACKERS,
            where="Guard(trackers=...)",
            on_failure=parts.journal.failure(events.TRACKER_FAILED),
        )
    parts.recorder = recorder_for(place, parts, quarantine=quarantine)
    if parts.recorder is not None:
        # A bad batch may be wanted again, however early the host looked.
        parts.keeper = Keeper(trial=lag + 2 if lag else 0)
    return parts


def _incidents_folder(
    run_dir: Path | None, *, wanted: str | Path | bool | None
) -> str | Path | None:
    """Returns the folder for incidents; None if there are to be none."""
    if not isinstance(wanted, bool):
        return wanted
    if wanted and run_dir is None:
        raise UsageError(
            "there is no run folder to keep incidents in.",
            where="Guard(incidents=True)",
            do='Give one, Guard(..., run_dir="runs/night", incidents=True), or a folder for '
            'incidents alone: incidents="incidents".',
        )
    return run_dir if wanted else None


def recovery_for(parts: Parts, guard: Part) -> Recovery:
    """Returns the snapshots of a run, which cover everything that its steps change.

    Args:
        parts: The run.
        guard: The part that says where in the run a state belongs.
    """
    covered: dict[str, Part] = {
        "parameters": Parameters(lambda: trained(parts.models, parts.optimizers)),
        BUFFERS: Buffers(lambda: buffer_registries(parts.models), parts.devices[0]),
        "scaler": parts.scaling,
    }
    covered.update({f"optimizer-{i}": OptimizerPart(o) for i, o in enumerate(parts.optimizers)})
    covered.update({f"scheduler-{i}": SchedulerPart(s) for i, s in enumerate(parts.schedulers)})
    if parts.average is not None:
        covered["ema"] = parts.average
    # The last, as nothing is to be said about the place of a state that did not fit.
    covered[GUARD] = guard
    folder = None if parts.run_dir is None else parts.run_dir / SNAPSHOTS
    return Recovery(
        TrainingState(covered),
        parts.settings,
        folder=folder,
        ranks=parts.ranks,
        sharded=parts.ranks.sharded and parts.ranks.world > 1,
        on_failure=parts.journal.failure(events.SNAPSHOT_FAILED),
        before_finish=parts.journal.flush,
    )


def _as_list(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


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
