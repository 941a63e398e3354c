"""What a guard is given: models and optimizers in any number, checked before the run starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from nanguard.errors import UsageError
from nanguard.guard.optimizers import parameters_of
from nanguard.numerics import all_finite, local

Models = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]
Optimizers = Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer]

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def as_models(given: Models) -> list[nn.Module]:
    """Returns the models of a guard; refuses what cannot be trained."""
    models = _as_list(given, nn.Module, "model")
    if not any(True for model in models for _ in model.parameters()):
        raise UsageError(
            f"{_kinds(models)} has no parameters, so there is nothing to protect.",
            where="Guard(model, ...)",
            do="Give the module that is trained (or a list of modules), after it was built.",
        )
    return models


def as_optimizers(given: Optimizers, models: Sequence[nn.Module]) -> list[Optimizer]:
    """Returns the optimizers of a guard; refuses those of another model."""
    optimizers = _as_list(given, Optimizer, "optimizer")
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


def _as_list(given: Any, kind: type[Any], word: str) -> list[Any]:
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
