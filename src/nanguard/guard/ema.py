"""The moving average of the weights: how it is updated, and what it is made of."""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from nanguard.errors import UsageError
from nanguard.guard.optimizers import parameters_of
from nanguard.numerics import local

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from nanguard.guard.held import Slot


class Average:
    """Wraps whatever the user keeps a moving average with.

    Known forms: ``torch.optim.swa_utils.AveragedModel``; anything with ``update(model)`` or
    ``update()`` (timm, torch_ema, ema-pytorch); anything with ``step(parameters)`` (diffusers);
    a pair of a module and a function that updates it.
    """

    def __init__(self, ema: Any, models: Sequence[nn.Module]) -> None:
        self._of = ema[0] if isinstance(ema, tuple) else ema
        self._update = _updater(ema, models[0])
        self._checked = False
        self._model = {id(p) for p in models[0].parameters()}
        self._foreign = {id(t) for model in models for t in (*model.parameters(), *model.buffers())}

    def follows(self, optimizer: Optimizer) -> bool:
        """Returns whether an optimizer trains the model that is averaged."""
        return any(id(p) in self._model for p in parameters_of([optimizer]))

    def update(self) -> bool:
        """Takes the current weights in; returns whether the average put new objects in place."""
        before = self._held_objects()
        self._update()
        if not self._checked:
            self._checked = True
            self._check_found()
        return self._held_objects() != before

    def _held_objects(self) -> list[int]:
        return [id(value) for value in vars(self._of).values() if not _is_number(value)]

    def _check_found(self) -> None:
        if not self.slots():
            raise UsageError(
                f"nanguard finds no tensors in the EMA of type {type(self._of).__name__}.",
                where="Guard(ema=...)",
                do="Give ema=(ema_model, update), where update() takes the current weights in.",
            )

    def slots(self) -> list[Slot]:
        """Returns the places of the average's own tensors."""
        return list(_places(self._of, self._foreign, set()))

    def counters(self) -> dict[str, Any]:
        """Returns the plain numbers the average keeps about itself, by where they are."""
        return {path: container[key] for path, container, key in self._numbers()}

    def set_counters(self, counters: dict[str, Any]) -> None:
        """Puts back what ``counters`` returned."""
        for path, container, key in self._numbers():
            if path in counters:
                container[key] = counters[path]

    def _numbers(self) -> list[tuple[str, Any, Any]]:
        return list(_numbers(self._of, "", self._foreign, set()))

    def tensors(self) -> list[Tensor]:
        """Returns the average's own tensors."""
        return [container[key] for container, key in self.slots()]

    def state_dict(self) -> dict[str, Any]:
        """Returns the average, with its live tensors."""
        return {"tensors": self.tensors(), "counters": self.counters()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from what ``state_dict`` returned."""
        if state["tensors"] and not self.slots():
            self._update()  # some averages are made by their first update
        if state["tensors"]:
            for live, saved in zip(self.tensors(), state["tensors"], strict=True):
                local(live).copy_(local(saved))
        self.set_counters(state["counters"])


def _updater(ema: Any, model: nn.Module) -> Callable[[], Any]:
    if isinstance(ema, tuple):
        if len(ema) != 2 or not callable(ema[1]):
            raise UsageError(
                f"ema is a tuple of {len(ema)}, not of a module and a function that updates it.",
                where="Guard(ema=...)",
                do="Give ema=(ema_model, update), where update() takes the weights in.",
            )
        update: Callable[[], Any] = ema[1]
        return update
    for name in ("update_parameters", "update"):
        method = getattr(ema, name, None)
        if callable(method):
            return partial(method, model) if _needs_argument(method) else method
    step = getattr(ema, "step", None)
    if callable(step):
        return lambda: step(model.parameters())
    raise UsageError(
        f"nanguard does not know how to update an EMA of type {type(ema).__name__}.",
        where="Guard(ema=...)",
        do="Give ema=(ema_model, update), where update() takes the current weights in.",
    )


def _needs_argument(method: Callable[..., Any]) -> bool:
    parameters = inspect.signature(method).parameters.values()
    return any(
        p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        for p in parameters
    )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float))


def _places(value: Any, foreign: set[int], seen: set[int]) -> Iterator[Slot]:
    """Yields where tensors hang below an object, without those of the trained model."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        for module in value.modules():
            for registry in (module._parameters, module._buffers):
                yield from _own(registry, registry.items(), foreign)
        return
    inner = value if isinstance(value, (dict, list, tuple)) else vars(value)
    items = list(inner.items() if isinstance(inner, dict) else enumerate(inner))
    yield from _own(inner, items, foreign)
    for _, held in items:
        if _belongs(held, foreign):
            yield from _places(held, foreign, seen)


def _numbers(
    value: Any, path: str, foreign: set[int], seen: set[int]
) -> Iterator[tuple[str, Any, Any]]:
    """Yields where plain numbers hang below an object; those of modules are not among them."""
    if id(value) in seen:
        return
    seen.add(id(value))
    inner = value if isinstance(value, (dict, list)) else vars(value)
    for key, held in list(inner.items() if isinstance(inner, dict) else enumerate(inner)):
        if _is_number(held) and key != "training":
            yield f"{path}/{key}", inner, key
        elif not isinstance(held, (torch.Tensor, nn.Module, tuple)) and _belongs(held, foreign):
            yield from _numbers(held, f"{path}/{key}", foreign, seen)


def _own(container: Any, items: Any, foreign: set[int]) -> Iterator[Slot]:
    for key, tensor in list(items):
        if isinstance(tensor, torch.Tensor) and id(tensor) not in foreign:
            yield container, key


def _belongs(held: Any, foreign: set[int]) -> bool:
    """Returns whether what hangs below an average is a part of it, and not of the run around it."""
    if isinstance(held, (dict, list, tuple)):
        return True
    if isinstance(held, nn.Module):
        return not _is_model(held, foreign)
    plain = hasattr(held, "__dict__") and not callable(held) and not isinstance(held, torch.Tensor)
    return plain and not any(
        isinstance(value, Optimizer) or _is_model(value, foreign) for value in vars(held).values()
    )


def _is_model(held: Any, foreign: set[int]) -> bool:
    return isinstance(held, nn.Module) and any(id(p) in foreign for p in held.parameters())
