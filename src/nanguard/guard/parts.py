"""Puts a guard together from what the user gives it, down to who writes its incidents."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from nanguard.errors import UsageError
from nanguard.guard import events
from nanguard.guard.batches import Keeper
from nanguard.guard.gate import Gate
from nanguard.guard.journal import Journal
from nanguard.guard.optimizers import LossScaling, parameters_of
from nanguard.guard.ranks import Ranks
from nanguard.guard.rng import RandomStreams
from nanguard.guard.unchanged import Average, Unchanged
from nanguard.guard.verdicts import Verdicts
from nanguard.numerics import all_finite, local
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
    from collections.abc import Callable

    from nanguard.guard.journal import Event, WrittenIncident
    from nanguard.guard.policy import Decision, Trouble
    from nanguard.guard.rng import Stream
    from nanguard.guard.verdicts import Symptom
    from nanguard.settings import Settings
    from nanguard.snapshots.training_state import Part

Models = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]
Optimizers = Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer]

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def as_models(given: Models) -> list[nn.Module]:
    """Returns the models of a guard; refuses what cannot be trained."""
    models = _all_of(given, nn.Module, "model")
    if not any(True for model in models for _ in model.parameters()):
        raise UsageError(
            f"{_kinds(models)} has no parameters, so there is nothing to protect.",
            where="Guard(model, ...)",
            do="Give the module that is trained (or a list of modules), after it was built.",
        )
    return models


def as_optimizers(given: Optimizers, models: Sequence[nn.Module]) -> list[Optimizer]:
    """Returns the optimizers of a guard; refuses those of another model."""
    optimizers = _all_of(given, Optimizer, "optimizer")
    known = {id(p) for model in models for p in model.parameters()}
    for index, optimizer in enumerate(optimizers):
        if not any(id(p) in known for p in parameters_of([optimizer])):
            raise UsageError(
                f"optimizer {index} ({type(optimizer).__name__}) holds none of the parameters of "
                f"{_kinds(models)}, so its steps would not train it.",
                where="Guard(model, optimizer)",
                do="Build the optimizer from model.parameters() after the model was moved, "
                "wrapped or sharded, and give both to the guard.",
            )
    return optimizers


def check_finite(parameters: Mapping[str, Tensor]) -> None:
    """Refuses parameters that are not finite before the first step."""
    for name, tensor in parameters.items():
        if not all_finite([tensor]):
            raise UsageError(
                f"parameter {name} holds a non-finite value before the first step.",
                where="Guard(model, ...)",
                do="Load a good checkpoint, or initialise the parameter; a guard cannot roll back "
                "to a state that was never good.",
            )


def inner_scheduler(scheduler: Any) -> Any:
    """Returns the scheduler inside of a framework's wrapper, or the scheduler itself."""
    return getattr(scheduler, "scheduler", scheduler)


def moves(scheduler: Any, optimizers: Sequence[Any]) -> bool:
    """Returns whether a scheduler moves one of the optimizers, or does not say whose it is."""
    owner = getattr(inner_scheduler(scheduler), "optimizer", None)
    # What a framework has wrapped is known by what is inside of it.
    owners = (owner, getattr(owner, "optimizer", owner))
    return owner is None or any(own is optimizer for own in owners for optimizer in optimizers)


def refuse_plateau(schedulers: Sequence[Any]) -> None:
    """Refuses a scheduler that follows a metric where schedulers are stepped without one."""
    inner = [inner_scheduler(scheduler) for scheduler in schedulers]
    if any(isinstance(scheduler, ReduceLROnPlateau) for scheduler in inner):
        raise UsageError(
            "ReduceLROnPlateau follows a metric and cannot be stepped with every update.",
            where="Guard(scheduler=...)",
            do='Give scheduler_every="epoch", and the metric with guard.end_epoch(val_loss=...).',
        )


def check_loss(
    loss: Any, devices: Sequence[torch.device], where: str, *, needs_grad: bool = True
) -> None:
    """Refuses what is no loss: backward would fail, or worse, wait for another device."""
    if not isinstance(loss, torch.Tensor):
        raise UsageError(
            f"the loss is of type {type(loss).__name__}, not a tensor.",
            where=where,
            do="Give the tensor that the loss function returned; .item() and float() cut it off "
            "from the model.",
        )
    if loss.numel() != 1:
        raise UsageError(
            f"the loss has shape {tuple(loss.shape)}, not one value.",
            where=where,
            do="Reduce it first, for example with loss.mean().",
        )
    if loss.device not in devices:
        raise UsageError(
            f"the loss is on {loss.device}, the parameters are on {', '.join(map(str, devices))}.",
            where=where,
            do=f"Compute the loss where the model is, or move it: loss.to({str(devices[0])!r}).",
        )
    if needs_grad and not loss.requires_grad:
        raise UsageError(
            "the loss has no gradient: it does not depend on any parameter that is trained.",
            where=where,
            do="Look for a detach(), .data, torch.no_grad() or frozen parameters between the "
            "model and the loss.",
        )


def named(models: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Returns the parameters by the names the user knows them by."""
    return {
        prefix + _plain(name, model): parameter
        for prefix, model in _prefixed(models)
        for name, parameter in model.named_parameters()
    }


def buffer_registries(models: Sequence[nn.Module]) -> dict[str, dict[str, Any]]:
    """Returns where each module keeps its buffers, by the name the user knows the module by."""
    return {
        (prefix + _plain(name, model)).rstrip("."): module._buffers
        for prefix, model in _prefixed(models)
        for name, module in model.named_modules()
    }


def _prefixed(models: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    return [(f"{i}." if len(models) > 1 else "", model) for i, model in enumerate(models)]


def trained(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """Returns the parameters of the models, and those that only an optimizer knows of."""
    found = named(models)
    known = {id(p) for p in found.values()}
    for index, optimizer in enumerate(optimizers):
        for place, parameter in enumerate(parameters_of([optimizer])):
            if id(parameter) not in known:
                found[f"optimizer {index} parameter {place}"] = parameter
    return found


def devices_of(optimizers: Sequence[Optimizer]) -> list[torch.device]:
    """Returns the devices that parameters live on, that of the first parameter first."""
    return list(dict.fromkeys(local(p).device for p in parameters_of(optimizers)))


def _plain(name: str, model: nn.Module) -> str:
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    if isinstance(model, DistributedDataParallel) and parts[0] == "module":
        parts = parts[1:]
    return ".".join(parts)


def _all_of(given: Any, kind: type[Any], word: str) -> list[Any]:
    if isinstance(given, kind):
        return [given]
    items = list(given.values()) if isinstance(given, Mapping) else given
    if isinstance(items, Sequence) and items and all(isinstance(item, kind) for item in items):
        return list(items)
    raise UsageError(
        f"{word} is {_describe(given)}, not a {kind.__name__} or a list of them.",
        where="Guard(model, optimizer)",
        do=f"Give a torch {kind.__name__}, a list or a dict of them; "
        "for a wrapped one, give what it wraps.",
    )


def _describe(given: Any) -> str:
    if isinstance(given, (list, tuple)):
        return f"a {type(given).__name__} of {[type(item).__name__ for item in given]}"
    return f"of type {type(given).__name__}"


def _kinds(models: Sequence[nn.Module]) -> str:
    return ", ".join(type(model).__name__ for model in models)


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
        journal=Journal(folder, first=ranks.first, tells=ranks.tells_of(0), on_event=on_event),
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

    def bad(self, bad: BadStep) -> WrittenIncident | None:
        """Writes the incident of a bad step, explained if that can be done; returns it."""

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
