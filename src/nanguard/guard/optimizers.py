"""How each kind of optimizer, and a GradScaler, is kept from applying a bad step."""

from __future__ import annotations

import contextlib
import gc
import inspect
import math
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import OptState
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nanguard.findings import name_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor
    from torch.amp import GradScaler

    from nanguard.guard.held import Slot

_FUSED = (Adam, AdamW, SGD, Adagrad)


def can_be_gated(optimizer: Optimizer) -> bool:
    """Returns whether an optimizer's own kernel honours ``found_inf``.

    These are torch's fused Adam, AdamW, SGD and Adagrad. A subclass with a ``step`` of its own
    may not pass the flag on, so it does not count. Neither does an optimizer before its first
    step, nor SGD while a momentum buffer is missing: gated, it would leave one behind that was
    never filled.
    """
    fused = all(group.get("fused") is True for group in optimizer.param_groups)
    if not fused or not _has_own_kernel(optimizer):
        return False
    if isinstance(optimizer, SGD):
        return all(_has_momentum(optimizer, group) for group in optimizer.param_groups)
    return bool(optimizer.state)


def _has_own_kernel(optimizer: Optimizer) -> bool:
    """Returns whether ``optimizer.step`` is torch's own, if need be below a scheduler's wrapper."""
    # torch wraps these functions when a first optimizer is made, so they are looked up each time.
    known = {kind.step for kind in _FUSED}
    if type(optimizer).step not in known:
        return False
    replaced = vars(optimizer).get("step")
    if replaced is None:
        return True
    replaced = getattr(replaced, "_torchdynamo_orig_callable", replaced)
    if hasattr(replaced, "_wrapped_by_lr_sched") and not hasattr(replaced, "__wrapped__"):
        return True  # schedulers of older versions do not say what they wrap
    return inspect.unwrap(replaced) in {inspect.unwrap(step) for step in known}


def _has_momentum(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Returns whether every parameter that is about to move has the momentum buffer it needs."""
    if group["momentum"] == 0:
        return True
    return all(
        p.grad is None or optimizer.state.get(p, {}).get("momentum_buffer") is not None
        for p in group["params"]
    )


def parameters_of(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """Returns the parameters of some optimizers, each once."""
    found = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    return found if len(optimizers) == 1 else list({id(p): p for p in found}.values())


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    """Returns copies of the gradients that an optimizer would use."""
    grads = [p.grad for p in parameters_of([optimizer])]
    return [grad.detach().clone() for grad in grads if grad is not None]


def state_tensors(optimizers: Iterable[Optimizer]) -> Iterator[Tensor]:
    """Yields every tensor in the state of some optimizers."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            yield from _tensors(state)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensors(inner)


def moments_of(optimizer: Optimizer) -> list[Tensor]:
    """Returns the tensors of an optimizer's state that have a number for each of a parameter's."""
    return [
        value
        for parameter, state in optimizer.state.items()
        for value in (state.values() if isinstance(state, dict) else ())
        if isinstance(value, torch.Tensor)
        and value.shape == getattr(parameter, "shape", None)
        and value.shape
        and not value.is_meta
    ]


def innermost(optimizer: Any) -> Any:
    """Returns the optimizer inside of a wrapper (Accelerate's, for example)."""
    try:
        inner = optimizer.__dict__.get("optimizer")
    except AttributeError:
        return optimizer
    return inner if isinstance(inner, Optimizer) else optimizer


def learning_rate(optimizers: Sequence[Optimizer]) -> float | None:
    """Returns the largest learning rate of some optimizers; one on a device is not read."""
    return largest_rate([group for optimizer in optimizers for group in optimizer.param_groups])


def largest_rate(groups: Sequence[dict[str, Any]]) -> float | None:
    """Returns the largest learning rate among parameter groups; one on a device is not read.

    One that is not finite comes first.
    """
    rates = [group.get("lr") for group in groups]
    if len(rates) == 1 and type(rates[0]) is float:
        return rates[0]
    known = [float(rate) for rate in rates if rate is not None and not _on_device(rate)]
    return next((rate for rate in known if not math.isfinite(rate)), max(known, default=None))


def _on_device(rate: object) -> bool:
    return isinstance(rate, torch.Tensor) and rate.device.type != "cpu"


def schedulers_of(optimizer: Optimizer) -> list[LRScheduler]:
    """Returns what sets the learning rates of an optimizer."""
    # Some objects raise when they are asked for their class.
    found = [one for one in gc.get_objects() if issubclass(type(one), LRScheduler)]
    return [one for one in found if getattr(one, "optimizer", None) is optimizer]


def bad_schedule_state(optimizer: Optimizer) -> str | None:
    """Returns which number that a scheduler goes by is not finite; None if all of them are."""
    for scheduler in schedulers_of(optimizer):
        for name, value in vars(scheduler).items():
            several = isinstance(value, (list, tuple))
            for place, number in enumerate(value if several else [value]):
                # What it was last is what it made, and not what it goes by.
                if isinstance(number, float) and not math.isfinite(number) and "last" not in name:
                    index = f"[{place}]" if several else ""
                    return f"{name}{index} of {type(scheduler).__name__} is {name_of(number)}"
    return None


class Gated:
    """Makes the steps inside a no-op on the device where the latch is set.

    A class, as every step pays for it, and a generator would take three times as long.
    """

    __slots__ = ("_latch", "_optimizers")

    def __init__(self, optimizers: Sequence[Optimizer], latch: Tensor) -> None:
        self._optimizers = optimizers
        self._latch = latch

    def __enter__(self) -> None:
        for optimizer in self._optimizers:
            optimizer.found_inf = self._latch  # type: ignore[attr-defined]
            optimizer.grad_scale = None  # type: ignore[attr-defined]

    def __exit__(self, *_error: object) -> None:
        for optimizer in self._optimizers:
            optimizer.__dict__.pop("found_inf", None)
            optimizer.__dict__.pop("grad_scale", None)


@contextlib.contextmanager
def scaled_lr(optimizers: Sequence[Optimizer], factor: float) -> Iterator[None]:
    """Multiplies the learning rates for the steps inside; schedulers never see it."""
    if factor == 1.0:
        yield
        return
    # Some optimizers find their own rate, and have None there.
    every = (group for optimizer in optimizers for group in optimizer.param_groups)
    groups = [group for group in every if group["lr"] is not None]
    before = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = group["lr"] * factor
    try:
        yield
    finally:
        for group, rate in zip(groups, before, strict=True):
            group["lr"] = rate


def hyperparameters(optimizers: Iterable[Optimizer]) -> list[dict[str, Any]]:
    """Returns what a scheduler may change in the parameter groups."""
    saved = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            values = group.copy()
            del values["params"]
            if torch.Tensor in set(map(type, values.values())):
                values = {k: v.clone() if type(v) is torch.Tensor else v for k, v in values.items()}
            saved.append(values)
    return saved


def set_hyperparameters(optimizers: Iterable[Optimizer], saved: list[dict[str, Any]]) -> None:
    """Puts back what ``hyperparameters`` returned; tensors are filled in place."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    # A group that was added since has no earlier values.
    for group, values in zip(groups, saved, strict=False):
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                group[key].copy_(value)
            else:
                group[key] = value


class Round:
    """The optimizers that step one after the other, after the same backward pass.

    What one of them applies belongs to the same step as what the others do: if the gradients of one
    are bad, none of them may move.

    Attributes:
        partners: Those that stepped after an optimizer the last time it was the first of a round.
        number: How many rounds there were.
    """

    def __init__(self) -> None:
        self.partners: weakref.WeakKeyDictionary[Optimizer, list[weakref.ref[Optimizer]]]
        self.partners = weakref.WeakKeyDictionary()
        self.number = 0
        self._members: list[weakref.ref[Optimizer]] = []
        self._backwards = -1
        self._is_held_back = False

    def enter(self, optimizer: Optimizer, backwards: int) -> bool:
        """Notes that an optimizer steps; returns whether the step was held back already.

        Args:
            optimizer: The optimizer.
            backwards: How many backward passes there were so far.
        """
        # Some scripts never call backward: whoever steps a second time begins another round.
        if backwards == self._backwards and all(one() is not optimizer for one in self._members):
            self._members.append(weakref.ref(optimizer))
            return self._is_held_back
        self._is_held_back = False
        self.number += 1
        if self._members:
            first = self._members[0]()
            if first is optimizer and len(self._members) == 1 and not self.partners:
                self._backwards = backwards  # nearly every script has one optimizer
                return False
            if first is not None and (len(self._members) > 1 or first in self.partners):
                self.partners[first] = self._members[1:]
        self._members, self._backwards = [weakref.ref(optimizer)], backwards
        return False

    def hold_back(self) -> None:
        """Notes that the step that is being made is held back."""
        self._is_held_back = True

    def others(self, optimizer: Optimizer) -> list[Optimizer]:
        """Returns the optimizers that are likely to step after this one, the first of its round."""
        known = self.partners.get(optimizer) if self.partners else None
        if not known or len(self._members) > 1:
            return []
        return [o for partner in known if (o := partner()) is not None and o is not optimizer]


class LossScaling:
    """Wraps a GradScaler, or the absence of one.

    An overflow that the scaler handles by itself (finite loss, non-finite gradient) is how
    dynamic loss scaling works and no fault. A non-finite loss is one, and so is an overflow at a
    scale of 1 or less, where the scale cannot be to blame.
    """

    def __init__(self, scaler: GradScaler | None) -> None:
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None

    @property
    def scaler(self) -> GradScaler | None:
        """The scaler, if losses are scaled."""
        return self._scaler

    @property
    def active(self) -> bool:
        """Whether losses are scaled."""
        return self._scaler is not None

    def slots(self) -> list[Slot]:
        """Returns the places of the scaler's own tensors."""
        if self._scaler is None:
            return []
        return [(vars(self._scaler), "_scale"), (vars(self._scaler), "_growth_tracker")]

    def scale(self, loss: Tensor) -> Tensor:
        """Returns the loss to call ``backward`` on."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def unscale(self, optimizers: Sequence[Optimizer]) -> None:
        """Divides the gradients by the scale, unless the user has done it already."""
        if self._scaler is None:
            return
        for optimizer in optimizers:
            if not self._found_inf(optimizer):
                self._scaler.unscale_(optimizer)

    def readings(self, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
        """Returns the scale, and whether the gradients overflowed, as 0-dim tensors."""
        if self._scaler is None:
            return {}
        scale = self._scaler._scale
        assert scale is not None  # noqa: S101 - scale() has been called before
        found = [
            flag.to(scale.device, non_blocking=True)
            for optimizer in optimizers
            for flag in self._found_inf(optimizer).values()
        ]
        return {"scale": scale.clone(), "overflow": torch.stack(found).amax()}

    def unscaled(self, loss: Tensor) -> Tensor:
        """Returns a loss as it was before it was scaled."""
        if self._scaler is None or self._scaler._scale is None:
            return loss
        return loss / self._scaler._scale

    def seen(self, optimizers: Sequence[Optimizer], norm: Tensor) -> dict[str, Tensor]:
        """Returns the readings of a step that somebody else makes.

        Where its gradients are not unscaled yet, ``factor`` is what their norm is too large by.

        Args:
            optimizers: Whose step it is.
            norm: The norm of their gradients as they are.
        """
        if self._scaler is None or self._scaler._scale is None:
            return {}
        if all(self._found_inf(optimizer) for optimizer in optimizers):
            return self.readings(optimizers)
        scale = self._scaler._scale
        overflow = (~torch.isfinite(norm)).to(scale)
        return {"scale": scale.clone(), "overflow": overflow, "factor": scale}

    def overflow(self, optimizers: Sequence[Optimizer]) -> None:
        """Makes a scaler skip the step that it is about to take by itself."""
        if self._scaler is None:
            return
        for optimizer in optimizers:
            first = next(p for group in optimizer.param_groups for p in group["params"])
            first.grad = torch.full_like(first, float("inf"))

    def update(self) -> None:
        """Lets the scaler grow or back off."""
        if self._scaler is not None:
            self._scaler.update()

    def forget(self) -> None:
        """Drops what the scaler recorded about this step and keeps its scale as it is."""
        if self._scaler is not None:
            self._scaler._per_optimizer_states.clear()

    def state_dict(self) -> dict[str, Any] | None:
        """Returns the scaler's numbers as they lie on the device; None without a scaler."""
        if self._scaler is None:
            return None
        if self._scaler._scale is None:
            return {"scale": self._scaler._init_scale, "growth": self._scaler._init_growth_tracker}
        return {"scale": self._scaler._scale, "growth": self._scaler._growth_tracker}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continues from what ``state_dict`` returned."""
        if self._scaler is None or state is None:
            return
        full = self._scaler.state_dict()
        full["scale"] = float(state["scale"])
        full["_growth_tracker"] = int(state["growth"])
        self._scaler.load_state_dict(full)

    def _found_inf(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Returns what unscaling found out, by device; empty before it was done."""
        assert self._scaler is not None  # noqa: S101 - callers have checked
        return self._scaler._found_inf_per_device(optimizer)


@contextlib.contextmanager
def as_at_first(scaler: Any) -> Iterator[None]:
    """Makes a GradScaler, or None, believe for a while that no step of its round was begun."""
    states = getattr(scaler, "_per_optimizer_states", None)
    if states is None:
        yield
        return
    before = dict(states)
    states.clear()
    try:
        yield
    finally:
        states.clear()
        states.update(before)
        scaler._per_optimizer_states = states  # an update puts another one in its place


def pass_over(scaler: Any, optimizer: Any) -> None:
    """Makes a GradScaler believe that a step was made, so that it goes on as it would have."""
    state = scaler._per_optimizer_states[id(optimizer)]
    if state["stage"] is OptState.READY:
        scaler.unscale_(optimizer)
    state["stage"] = OptState.STEPPED
