"""What a step began with: the values of names, the random streams, and what no name says."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import sys
from collections import UserDict
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from operator import itemgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch._C import _is_any_autocast_enabled, _len_torch_function_stack
from torch.overrides import _get_current_function_mode_stack

from nanguard.guard.rng import is_generator
from nanguard.numerics import without_graph
from nanguard.replay.frames import names_of, stack_of
from nanguard.replay.tracer.sites import is_part_of_script, is_users

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import FrameType

    from torch import Tensor

    from nanguard.replay.frames import Stack
    from nanguard.replay.handed_on import Taking
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


@dataclass(frozen=True, slots=True)
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
        flags = (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_cache_enabled(),
            torch.get_default_dtype(),
        )
        if _is_any_autocast_enabled() or _len_torch_function_stack():
            modes = tuple(_get_current_function_mode_stack())
            return cls(flags[0], flags[1], _autocast_now(), flags[2], flags[3], modes)
        known = _PLAIN.get(flags)  # it is the same in almost every step
        if known is None:
            known = _PLAIN[flags] = cls(flags[0], flags[1], _NO_AUTOCAST, flags[2], flags[3], ())
        return known

    @contextlib.contextmanager
    def entered(self, *, autocast: bool = True) -> Iterator[None]:
        """Makes it so again, for a while.

        Args:
            autocast: Whether that goes for autocast, too.
        """
        before = dataclasses.replace(Ambient.now(), autocast=_autocast_now())
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


# What it was like without autocast and modes, by its flags.
_PLAIN: dict[tuple[bool, bool, bool, torch.dtype], Ambient] = {}


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

    @classmethod
    def now(cls, module: nn.Module, frame: FrameType, streams: dict[str, Any]) -> ModelCall:
        """Returns a call that is being made.

        Args:
            module: The model.
            frame: Where it is called.
            streams: The random streams.
        """
        stack = stack_of(frame)
        lines = {id(f): line for f, line in stack}
        names = {id(f): names_of(f) for f, _ in stack if is_users(f.f_code.co_filename)}
        return cls(module, lines, names, streams, Ambient.now(), stack)


class Start:
    """What a step began with.

    What most steps never ask for is worked out when somebody does: every step pays for what is
    done here, and next to none of them is replayed.

    Attributes:
        region: Its region.
        piece: The part of the region that follows.
        module: The globals of its module.
        cls: What ``super()`` means there.
        streams: The random streams.
        earlier: The random streams a little before, where the piece begins inside of a statement.
        step_end: The random streams at the end of the last step, if they are known.
        objects: The attributes of the script's own objects, and what its models count.
        earlier_objects: The same a little before.
        shared: The variables that functions inside of its code share with it.
        ambient: What is not said by names.
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
        taking: What the code knew that a generator has handed its value on to.
        turns: The turns of the loop before it whose graph it was given.
        made: The numbers that it has made, by where they are, if it is such a turn itself.
    """

    stepped = False
    site: Any = None
    only_asked = False
    reported = False
    func_calls = 0
    bad = False
    held: FrameType | None = None
    later: Start | None = None
    taking: Taking | None = None
    turns: tuple[Start, ...] = ()
    made: Mapping[str, Tensor] = MappingProxyType({})

    def __init__(
        self,
        region: Region,
        piece: Piece,
        taken: Taken,
        frame: FrameType,
        local: Mapping[str, Any],
        streams: dict[str, Any],
        ambient: Ambient,
    ) -> None:
        """Notes what cannot be noted later.

        Args:
            region: Its region.
            piece: The part of the region that follows.
            taken: The values of its live-in names.
            frame: Its frame.
            local: The names of the frame.
            streams: The random streams.
            ambient: What is not said by names.
        """
        self.region = region
        self.piece = piece
        self._taken = taken
        self.frame = id(frame)
        self.module = frame.f_globals
        self.cls = local.get("__class__")
        shared = frame.f_code.co_cellvars
        self.shared = {n: copied(local[n]) for n in shared if n in local} if shared else {}
        self._ids = piece.ids_in(local)
        self.streams = streams
        self.ambient = ambient
        self._copies = taken.copied_data() if region.moves else None
        self.given: list[Any] = []
        self.losses: list[Tensor] = []
        self.losses_at: list[tuple[Tensor, int]] = []
        self.earlier: dict[str, Any] | None = None
        self.step_end: dict[str, Any] | None = None
        self.objects: list[tuple[Any, dict[str, Any]]] = []
        self.earlier_objects = self.objects
        self.drawn: list[Any] = []
        self.batches: tuple[Given, ...] = ()

    @cached_property
    def names(self) -> dict[str, Any]:
        """The live-in names of the piece."""
        names = self._taken.some(self.piece.live)
        if self.batches and self.piece is self.region.whole() and self.region.kind == "function":
            names.update(self._as_given(names))
        return names

    @cached_property
    def before(self) -> dict[str, int]:
        """The names that it will write, with the identity of what they stood for; 0 for nothing."""
        return dict(zip(self.piece.stores, self._ids, strict=True))

    @cached_property
    def whole(self) -> dict[str, Any] | None:
        """Those of the whole region, as far as they are known where only a part was seen to begin.

        None where all of it was seen.
        """
        every = self.region.whole()
        if not self._taken.is_of_whole or self.piece is every:
            return None
        names = self._taken.some(every.live)
        return {**names, **self._as_given(names)}

    def _as_given(self, names: dict[str, Any]) -> dict[str, Any]:
        """Returns the batch as the loader has given it: the body may have changed it."""
        if not self.batches:
            return {}
        # A loader may be a batch ahead of the loop, as Accelerate's is.
        among = (batch for batch in reversed(self.batches) if batch.is_among(names))
        batch = next(among, self.batches[-1]).batch
        kind = kind_of(batch)
        if kind == "mapping":
            # A step takes things out of it, as the Trainer's does with the labels.
            fits = [n for n, v in names.items() if is_part(v, batch)]
            return {name: copied(batch) for name in fits}
        if kind != "sequence":
            return {}
        for target in self.region.unpacked:
            if len(target) == len(batch) and names.keys() >= set(target):
                return dict(zip(target, batch, strict=True))
        return {}

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
        return self._copies is None and self._taken.has_moved

    @property
    def is_in_forward(self) -> bool:
        """Whether what it began is recorded for backward, and has not come to it yet."""
        return self.site is None and self.ambient.grad

    def let_go_of_graphs(self) -> None:
        """Keeps what it was given without the graphs that lead there, and so their memory."""
        self._taken.let_go_of_graphs()
        vars(self).pop("names", None)  # it is read once more
        for kept in {id(one): one for one in (self.objects, self.earlier_objects)}.values():
            kept[:] = [(o, {n: without_graph(v) for n, v in held.items()}) for o, held in kept]

    def undo_changes(self) -> None:
        """Makes the tensors that it was given what they were, where there are copies of them."""
        for tensor, version, kept in self._copies or ():
            if tensor._version != version:
                tensor.copy_(kept)


class Reader:
    """Takes the values of some names out of a frame; every step does that."""

    def __init__(self, live: Sequence[str], whole: Sequence[str] | None) -> None:
        """Prepares.

        Args:
            live: The names.
            whole: Names of more of the code, if these are wanted, too; None if not.
        """
        self._names = tuple(dict.fromkeys((*live, *(whole or ()))))
        self._is_of_whole = whole is not None
        self._all = itemgetter(*self._names) if len(self._names) > 1 else None
        # The places of tensors and of containers among values of certain types: they are the same
        # in every step.
        self._places: dict[tuple[type, ...], tuple[list[int], list[int]]] = {}

    def take(self, local: Mapping[str, Any], module: Mapping[str, Any]) -> Taken:
        """Returns the values of the names, of those that are there.

        Args:
            local: The names of a frame.
            module: The globals, among which are the names that a function declares as such.
        """
        names = self._names
        try:
            values: Any = _NONE if self._all is None else self._all(local)
        except KeyError:
            values = _NONE
        if values is _NONE:  # one of them is not bound, or a global
            found = {n: place[n] for n in names for place in (module, local) if n in place}
            names, values = tuple(found), tuple(found.values())
        types = tuple(map(type, values))
        places = self._places.get(types)
        if places is None:
            places = self._find_places(types)
        tensors = [values[place] for place in places[0]]
        if places[1]:
            values = list(values)
            for place in places[1]:
                tensors += tensors_right_in(values[place])
                values[place] = copied(values[place])
        return Taken(names, values, tensors, is_of_whole=self._is_of_whole)

    def _find_places(self, types: tuple[type, ...]) -> tuple[list[int], list[int]]:
        kinds = list(enumerate(map(_KIND.__getitem__, types)))
        places = (
            [place for place, kind in kinds if kind == "tensor"],
            [place for place, kind in kinds if kind in ("mapping", "sequence")],
        )
        if len(self._places) < _MOST_KINDS:
            self._places[types] = places
        return places


class Taken:
    """Values of names as they were at one moment, and how often each tensor had been written to.

    Attributes:
        is_of_whole: Whether the names of a whole region are among them.
    """

    __slots__ = ("_names", "_tensors", "_values", "_versions", "is_of_whole")

    def __init__(
        self,
        names: tuple[str, ...],
        values: Sequence[Any],
        tensors: list[Tensor],
        *,
        is_of_whole: bool,
    ) -> None:
        self._names = names
        self._values = values
        self.is_of_whole = is_of_whole
        if len(tensors) > _COMPARED:
            del tensors[_COMPARED:]
        try:
            self._versions = list(map(_version_of, tensors))
        except RuntimeError:  # those of inference mode have none
            tensors = [tensor for tensor in tensors if not tensor.is_inference()]
            self._versions = list(map(_version_of, tensors))
        self._tensors = tensors

    def let_go_of_graphs(self) -> None:
        """Detaches the values."""
        self._values = [without_graph(value) for value in self._values]
        kept = [t.grad_fn is None for t in self._tensors]
        self._versions = list(compress(self._versions, kept))
        self._tensors = list(compress(self._tensors, kept))

    def every(self) -> dict[str, Any]:
        """Returns the values of all names that were there."""
        return dict(zip(self._names, self._values, strict=True))

    def some(self, names: Sequence[str]) -> dict[str, Any]:
        """Returns the values of some of the names."""
        every = self.every()
        return {name: every[name] for name in names if name in every}

    @property
    def has_moved(self) -> bool:
        """Whether a tensor that holds data was written to since."""
        if list(map(_version_of, self._tensors)) == self._versions:
            return False
        return any(
            tensor._version != version and not tensor.requires_grad
            for tensor, version in zip(self._tensors, self._versions, strict=True)
        )

    def copied_data(self) -> list[tuple[Tensor, int, Tensor]] | None:
        """Returns copies of the tensors that hold data; None if they are too large."""
        data = [
            (tensor, version)
            for tensor, version in zip(self._tensors, self._versions, strict=True)
            if not tensor.requires_grad
        ]
        if sum(tensor.numel() * tensor.element_size() for tensor, _ in data) > _SMALL:
            return None
        return [(tensor, version, tensor.detach().clone()) for tensor, version in data]


class Given:
    """A batch as a loader has handed it out.

    Attributes:
        batch: The batch, or a copy of it.
    """

    __slots__ = ("_tensors", "_versions", "batch")

    def __init__(self, batch: Any, *, copies: bool) -> None:
        kind = kind_of(batch)
        tensors = tensors_right_in(batch) if kind in ("mapping", "sequence") else []
        self._tensors = [t for t in tensors if not t.requires_grad and not t.is_inference()]
        self._versions = list(map(_version_of, self._tensors))
        self.batch = copied(batch)
        if copies and kind == "sequence" and bytes_of(batch) <= _SMALL:
            self.batch = [t.clone() if _is_data(t) else t for t in batch]

    def is_among(self, names: dict[str, Any]) -> bool:
        """Returns whether one of its tensors is among some values, or in one of them."""
        own = set(map(id, self._tensors))
        for value in names.values():
            if id(value) in own:
                return True
            if kind_of(value) == "mapping" and any(id(v) in own for v in value.values()):
                return True
        return False

    @property
    def has_moved(self) -> bool:
        """Whether it was changed in place since."""
        return list(map(_version_of, self._tensors)) != self._versions


_NONE = object()
_version_of: Callable[[Tensor], int] = torch._C.TensorBase._version.__get__  # type: ignore[attr-defined]


def tensors_right_in(container: Any) -> list[Tensor]:
    """Returns the tensors that a container holds itself; none of one that holds many things."""
    if len(container) > _COMPARED:
        return []
    parts = container.values() if kind_of(container) == "mapping" else container
    return [part for part in parts if _KIND[type(part)] == "tensor"]


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


def script_values(frame: FrameType) -> list[Any]:
    """Returns what the names of a frame, of its ``self`` and of the script's modules stand for."""
    places: list[Mapping[str, Any]] = [frame.f_locals]
    places += [vars(m) for m in list(sys.modules.values()) if is_part_of_script(m)]
    owner = frame.f_locals.get("self")
    if hasattr(owner, "__dict__"):
        places.append(vars(owner))
    return [value for place in places for value in list(place.values())]


def generators_in(values: list[Any]) -> list[Any]:
    """Returns the random generators among values, and in the script's own objects among them."""
    inner = [part for value in values if is_plain_object(value) for part in vars(value).values()]
    return [value for value in (*values, *inner) if is_generator(value)]


def is_plain_object(value: object) -> bool:
    """Returns whether a value is an object of a class of the script's own, and no model."""
    own = type(getattr(value, "__dict__", None)) is dict and not isinstance(value, nn.Module)
    return own and is_part_of_script(sys.modules.get(type(value).__module__))


def loop_of(start: Start | None, frame: FrameType) -> Stack:
    """Returns a frame if its code is the loop that a step is made in: it lasts beyond the step."""
    if start is None or start.region.kind != "loop" or start.region.code is not frame.f_code:
        return []
    return [(frame, frame.f_lineno or 0)]
