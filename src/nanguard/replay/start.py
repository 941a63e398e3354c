"""What a step began with: the values of names, the random streams, and what no name says."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections import UserDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch._C import _len_torch_function_stack
from torch.overrides import _get_current_function_mode_stack

from nanguard.replay.tracer.sites import is_users

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import FrameType

    from torch import Tensor

    from nanguard.replay.frames import Stack
    from nanguard.replay.region import Piece, Region

# Bytes of a batch that is prepared in place, and so has to be copied before.
_SMALL = 64 << 20
# Tensors among the live-in names whose versions are compared.
_COMPARED = 64
# What a value is to a step that is given it.
Kind = Literal["tensor", "mapping", "sequence", "other"]


class _Kinds(dict[type, Kind]):
    """The kinds of types; each is found out once, as abstract classes are slow to answer."""

    def __missing__(self, kind: type) -> Kind:
        found: Kind = "other"
        if issubclass(kind, torch.Tensor):
            found = "tensor"
        elif issubclass(kind, (dict, UserDict)):
            found = "mapping"
        elif issubclass(kind, (list, tuple)):
            found = "sequence"
        # A class that is made in every step must not be kept, nor all of those before it.
        if len(self) < _MOST_KINDS:
            self[kind] = found
        return found


_MOST_KINDS = 1024
_KIND = _Kinds()


def kind_of(value: object) -> Kind:
    """Returns what a value is to a step that is given it."""
    return _KIND[type(value)]


_DEVICES = ("cuda", "cpu")
# Where autocast is off, its type is the one that the process has, and is not asked for.
_NO_AUTOCAST = tuple((device, False, None) for device in _DEVICES)


def _autocast_now() -> tuple[tuple[str, bool, Any], ...]:
    return tuple(
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in _DEVICES
    )


@dataclass(slots=True)
class Ambient:
    """What is not said by names, but changes what code computes.

    Attributes:
        grad: Whether operations are recorded for backward.
        inference: Whether inference mode is on.
        autocast: Each device with whether autocast is on there, and its type if that is known.
        cache: Whether autocast keeps the weights that it has cast.
        dtype: The default type.
        modes: The function modes that are active.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, Any], ...]
    cache: bool
    dtype: torch.dtype
    modes: tuple[Any, ...]

    @classmethod
    def now(cls) -> Ambient:
        """Returns how it is here."""
        autocast = _NO_AUTOCAST
        if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
            autocast = _autocast_now()
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            autocast,
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
        before.autocast = _autocast_now()
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
            if dtype is not None:
                torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self.cache)
        if torch.get_default_dtype() != self.dtype:
            torch.set_default_dtype(self.dtype)


@dataclass(slots=True)
class ModelCall:
    """A call of a model, until the region of its step is known.

    Attributes:
        module: The model.
        lines: The line that each frame was on, by the frame's identity.
        names: The names that each of the user's frames had.
        streams: The random streams.
        ambient: What is not said by names.
        frames: The frames, so that none of them is mistaken for another.
    """

    module: nn.Module
    lines: dict[int, int]
    names: dict[int, dict[str, Any]]
    streams: dict[str, Any]
    ambient: Ambient
    frames: Stack


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
        func_calls: Gradients of ``torch.func`` that it computes before those that it is about.
        bad: Whether its loss is known to be bad.
        held: The frame, until its backward pass begins: if that never comes, the names of the frame
            tell how the step ended. None for an evaluation.
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
    func_calls: int = 0
    bad: bool = False
    held: FrameType | None = None
    later: Start | None = None

    def add_losses(self, losses: list[Tensor]) -> None:
        """Notes the losses of a backward pass, which are detached.

        On a device a copy takes as long as half of what else is remembered, so there is none
        unless this script is known to change its losses in place.
        """
        for loss in losses:
            if self.region.changes_losses:
                self.losses.append(loss.clone())
            else:
                self.losses.append(loss)
                self.losses_at.append((loss, loss._version))

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

    __slots__ = ("_ids", "_versions", "batch")

    def __init__(self, batch: Any, *, copies: bool) -> None:
        kind = kind_of(batch)
        items: Any = ()
        if kind == "mapping" or kind == "sequence":
            parts = batch.values() if kind == "mapping" else batch
            items = parts if len(batch) <= _COMPARED else ()
        self._versions = [(t, t._version) for t in items if _is_data(t)]
        self._ids = {id(t) for t, _ in self._versions}
        self.batch = copied(batch)
        if copies and kind == "sequence":
            size = sum(t.numel() * t.element_size() for t, _ in self._versions)
            if size <= _SMALL:
                self.batch = [t.clone() if _is_data(t) else t for t in items]

    def is_among(self, names: dict[str, Any]) -> bool:
        """Returns whether one of its tensors is among some values, or in one of them."""
        own = self._ids
        for value in names.values():
            if id(value) in own:
                return True
            if kind_of(value) == "mapping" and any(id(v) in own for v in value.values()):
                return True
        return False

    @property
    def moved(self) -> bool:
        """Whether it was changed in place since."""
        return any(tensor._version != version for tensor, version in self._versions)


def bytes_of(batch: Any) -> int:
    """Returns how many bytes the tensors of a batch take, those right in it."""
    kind = kind_of(batch)
    if kind == "other":
        return 0
    parts = batch.values() if kind == "mapping" else batch
    tensors = [batch] if kind == "tensor" else [t for t in parts if kind_of(t) == "tensor"]
    return sum(t.numel() * t.element_size() for t in tensors)


def is_part(value: object, batch: dict[Any, Any] | UserDict[Any, Any]) -> bool:
    """Returns whether a value is a batch, or what is left of it."""
    return isinstance(value, (dict, UserDict)) and bool(value) and value.keys() <= batch.keys()


def _is_data(value: Any) -> bool:
    if kind_of(value) != "tensor":
        return False
    return not value.requires_grad and not value.is_inference()


def copied(value: Any) -> Any:
    """Returns a value as it is now: a step may take things out of a container that it is given."""
    kind = type(value)
    if kind is dict or kind is list:
        return value.copy() if len(value) <= _COMPARED else value
    if _KIND[kind] == "mapping" and UserDict in kind.__mro__:
        return copy.copy(value)
    return value


def keep_containers(names: dict[str, Any]) -> list[Any]:
    """Puts copies in the place of the containers among some values; returns all tensors in them.

    Args:
        names: The values, by their names.
    """
    types = tuple(map(type, names.values()))
    places = _PLACES.get(types)
    if places is None:
        kinds = list(enumerate(map(_KIND.__getitem__, types)))
        places = (
            [place for place, kind in kinds if kind == "tensor"],
            [place for place, kind in kinds if kind in ("mapping", "sequence")],
        )
        if len(_PLACES) < _MOST_KINDS:
            _PLACES[types] = places
    values = list(names.values())
    found = [values[place] for place in places[0]]
    if places[1]:
        keys = list(names)
        for place in places[1]:
            value = values[place]
            if len(value) <= _COMPARED:
                inner = value.values() if _KIND[types[place]] == "mapping" else value
                found += [v for v in inner if kind_of(v) == "tensor"]
            names[keys[place]] = copied(value)
    return found


# The places of tensors and of containers among values of certain types: they are the same in
# every step.
_PLACES: dict[tuple[type, ...], tuple[list[int], list[int]]] = {}


def versions_of(tensors: list[Any], *, copies: bool) -> list[tuple[Tensor, int, Any]]:
    """Returns tensors that hold data with their versions and, if wanted, copies."""
    room = _SMALL if copies else 0
    versions: list[tuple[Tensor, int, Any]] = []
    for tensor in tensors[:_COMPARED]:
        if tensor.requires_grad or tensor.is_inference():
            continue
        kept = None
        if room and (size := tensor.numel() * tensor.element_size()) <= room:
            kept = tensor.detach().clone()
            room -= size
        versions.append((tensor, tensor._version, kept))
    return versions


def devices_in_use() -> list[torch.device]:
    """Returns the device that this process computes on, if it has begun to."""
    if not torch.cuda.is_initialized():
        return []
    return [torch.device("cuda", torch.cuda.current_device())]


def _is_generator(value: object) -> bool:
    """Returns whether random numbers are drawn from a value."""
    kind = type(value)
    if kind is torch.Generator or kind is random.Random:
        return True
    known = kind.__name__ in ("Generator", "RandomState")
    return known and kind.__module__.startswith("numpy.random")


def script_values(frame: FrameType) -> list[Any]:
    """Returns what the names of a frame, of its ``self`` and of the script's modules stand for."""
    places: list[Mapping[str, Any]] = [frame.f_locals]
    places += [vars(m) for m in list(sys.modules.values()) if is_users_module(m)]
    owner = frame.f_locals.get("self")
    if hasattr(owner, "__dict__"):
        places.append(vars(owner))
    return [value for place in places for value in list(place.values())]


def generators_in(values: list[Any]) -> list[Any]:
    """Returns the random generators among values, and in the script's own objects among them."""
    inner = [part for value in values if is_plain_object(value) for part in vars(value).values()]
    return [value for value in (*values, *inner) if _is_generator(value)]


def is_plain_object(value: object) -> bool:
    """Returns whether a value is an object of a class of the script's own, and no model."""
    own = type(getattr(value, "__dict__", None)) is dict and not isinstance(value, nn.Module)
    return own and is_users_module(sys.modules.get(type(value).__module__))


def is_users_module(module: Any) -> bool:
    """Returns whether a module is a part of the script."""
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and is_users(file) and "site-packages" not in file
