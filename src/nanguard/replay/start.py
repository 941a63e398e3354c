"""What a step began with: the values of names, the random streams, and what no name says."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections import UserDict
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._C import _len_torch_function_stack
from torch.overrides import _get_current_function_mode_stack

from nanguard.replay.tracer.sites import is_users

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from nanguard.replay.region import Piece, Region

# Bytes of a batch that is prepared in place, and so has to be copied before.
_SMALL = 64 << 20
# Tensors among the live-in names whose versions are compared.
_COMPARED = 64
# Types of values that nobody can change, nor take anything out of.
IMMUTABLE = frozenset({int, float, bool, str, bytes, type(None), FunctionType, ModuleType})


@dataclass(slots=True)
class Ambient:
    """What is not said by names, but changes what code computes."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, Any], ...]
    cache: bool
    dtype: torch.dtype
    modes: tuple[Any, ...]

    @classmethod
    def now(cls) -> Ambient:
        """Returns how it is here."""
        cuda = ("cuda", torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"))
        cpu = ("cpu", torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            (cuda, cpu),
            torch.is_autocast_cache_enabled(),
            torch.get_default_dtype(),
            tuple(_get_current_function_mode_stack()) if _len_torch_function_stack() else (),
        )

    @contextlib.contextmanager
    def entered(self, *, autocast: bool = True) -> Iterator[None]:
        """Makes it so again, for a while.

        Args:
            autocast: Whether that goes for autocast, too.
        """
        before = Ambient.now()
        with contextlib.ExitStack() as stack:
            stack.callback(before._set_types)
            if autocast:
                self._set_types()
            else:
                for device, _, _ in before.autocast:
                    torch.set_autocast_enabled(device, False)  # noqa: FBT003 - it takes no name
            here = {id(mode) for mode in before.modes}
            for mode in self.modes:
                if id(mode) not in here:
                    stack.enter_context(mode)
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            yield

    def _set_types(self) -> None:
        for device, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self.cache)
        if torch.get_default_dtype() != self.dtype:
            torch.set_default_dtype(self.dtype)


@dataclass(slots=True, eq=False)
class Start:
    """What a step began with.

    Attributes:
        region: Its region.
        piece: The part of the region that follows.
        names: The live-in names.
        whole: Those of the whole region, as far as they are known where only a part of it was
            seen to begin.
        module: The globals of its module.
        cls: What ``super()`` means there.
        streams: The random streams.
        earlier: The random streams a little before, where the piece begins inside of a statement.
        objects: The attributes of the script's own objects.
        shared: The variables that functions inside of its code share with it.
        before: The names that it will write, as far as they are there, by their identity.
        ambient: What is not said by names.
        versions: The tensors among the names, as (tensor, version, copy or None).
        frame: Tells the frame from others that are alive.
        drawn: The batches that loaders had handed out for the step by then.
        given: The batches that loaders have handed out since.
        losses: The loss of each backward since.
        losses_at: The version that each of those had that are not copies.
        stepped: Whether an optimizer was called since.
        site: The place of the backward that ended it; None while it goes on.
        only_asked: Whether that was no backward, but gradients that the script has asked for.
        reported: Whether it was the start of a bad step that was told about.
        bad: Whether its loss is known to be bad.
        later: The same from the first call of a model on, where no loader hands out the data;
            None if nobody needs it.
    """

    region: Region
    piece: Piece
    names: dict[str, Any]
    whole: dict[str, Any] | None
    module: dict[str, Any]
    cls: Any
    streams: dict[str, Any]
    earlier: dict[str, Any] | None
    objects: list[tuple[Any, dict[str, Any]]]
    shared: dict[str, Any]
    before: dict[str, int]
    ambient: Ambient
    versions: list[tuple[Tensor, int, Tensor | None]]
    frame: int
    drawn: list[Any]
    given: list[Any] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    losses_at: list[tuple[Tensor, int]] = field(default_factory=list)
    stepped: bool = False
    site: Any = None
    only_asked: bool = False
    reported: bool = False
    bad: bool = False
    later: Start | None = None

    def add_losses(self, losses: list[Tensor]) -> None:
        """Notes the losses of a backward pass.

        On a device a copy takes as long as half of what else is remembered, so there is none
        unless this script is known to change its losses in place.
        """
        for loss in losses:
            if loss.is_cuda and not self.region.changes_losses:
                kept = loss.detach()
                self.losses_at.append((kept, kept._version))
            else:
                kept = loss.detach().clone()
            self.losses.append(kept)

    @property
    def lost_losses(self) -> bool:
        """Whether a loss was changed in place since."""
        return any(loss._version != version for loss, version in self.losses_at)

    @property
    def inexact(self) -> bool:
        """Whether a tensor was changed in place since, and nobody has a copy."""
        return any(
            kept is None and tensor._version != version for tensor, version, kept in self.versions
        )


class Given:
    """A batch as a loader has handed it out.

    Attributes:
        batch: The batch, or a copy of it.
    """

    def __init__(self, batch: Any, *, copies: bool) -> None:
        parts = batch.values() if isinstance(batch, (dict, UserDict)) else batch
        several = isinstance(batch, (dict, UserDict, list, tuple)) and len(batch) <= _COMPARED
        items = list(parts) if several else []
        self._versions = [(t, t._version) for t in items if _is_data(t)]
        size = sum(t.numel() * t.element_size() for t, _ in self._versions)
        self.batch = copied(batch)
        if copies and size <= _SMALL and isinstance(batch, (list, tuple)):
            self.batch = [t.clone() if _is_data(t) else t for t in items]

    def is_among(self, names: dict[str, Any]) -> bool:
        """Returns whether one of its tensors is among some values, or in one of them."""
        own = {id(tensor) for tensor, _ in self._versions}
        inner = [v.values() for v in names.values() if isinstance(v, (dict, UserDict))]
        return any(id(value) in own for values in (names.values(), *inner) for value in values)

    @property
    def moved(self) -> bool:
        """Whether it was changed in place since."""
        return any(tensor._version != version for tensor, version in self._versions)


def bytes_of(batch: Any) -> int:
    """Returns how many bytes the tensors of a batch take, those right in it."""
    parts = batch.values() if isinstance(batch, (dict, UserDict)) else batch
    several = isinstance(batch, (dict, UserDict, list, tuple))
    tensors = [t for t in (parts if several else (batch,)) if isinstance(t, torch.Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors)


def is_part(value: object, batch: dict[Any, Any] | UserDict[Any, Any]) -> bool:
    """Returns whether a value is a batch, or what is left of it."""
    return isinstance(value, (dict, UserDict)) and bool(value) and value.keys() <= batch.keys()


def _is_data(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_inference() and not value.requires_grad


def copied(value: Any) -> Any:
    """Returns a value as it is now: a step may take things out of a container that it is given."""
    kind = type(value)
    if kind is dict or kind is list:
        return value.copy() if len(value) <= _COMPARED else value
    # Asked of the class itself: to ask an abstract one takes ten times as long.
    return copy.copy(value) if UserDict in kind.__mro__ else value


def versions_of(names: dict[str, Any], *, copies: bool) -> list[tuple[Tensor, int, Any]]:
    """Returns the tensors among some values, with their versions and, if wanted, copies."""
    found: list[Any] = []
    for value in names.values():
        kind = type(value)
        if kind is dict:
            found += value.values() if len(value) <= _COMPARED else ()
        elif kind is list or kind is tuple:
            found += value if len(value) <= _COMPARED else ()
        elif kind not in IMMUTABLE:
            found.append(value)
    room = _SMALL if copies else 0
    versions: list[tuple[Tensor, int, Any]] = []
    for tensor in found:
        if not isinstance(tensor, torch.Tensor) or tensor.requires_grad or tensor.is_inference():
            continue
        kept = None
        if room and (size := tensor.numel() * tensor.element_size()) <= room:
            kept = tensor.detach().clone()
            room -= size
        versions.append((tensor, tensor._version, kept))
    return versions[:_COMPARED]


def devices_in_use() -> list[torch.device]:
    """Returns the device that this process computes on, if it has begun to."""
    if not torch.cuda.is_initialized():
        return []
    return [torch.device("cuda", torch.cuda.current_device())]


def is_generator(value: object) -> bool:
    """Returns whether random numbers are drawn from a value."""
    kind = type(value)
    if kind is torch.Generator or kind is random.Random:
        return True
    known = kind.__name__ in ("Generator", "RandomState")
    return known and kind.__module__.startswith("numpy.random")


def is_plain_object(value: object) -> bool:
    """Returns whether a value is an object of a class of the script's own, and no model."""
    own = type(getattr(value, "__dict__", None)) is dict and not isinstance(value, nn.Module)
    return own and is_users_module(sys.modules.get(type(value).__module__))


def is_users_module(module: Any) -> bool:
    """Returns whether a module is a part of the script."""
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and is_users(file) and "site-packages" not in file
