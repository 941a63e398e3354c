"""Remembers, while a run goes on, what each of its steps began with.

For each place that calls ``backward`` the region of its step is found once, from two stacks: that
of the model's call and that of ``backward``. From then on the values of the region's live-in names
and the random streams are remembered whenever it begins. Where Python can tell that a line is
reached (``sys.monitoring``, 3.12 and later) that is the region's first line; elsewhere it is the
statement that first calls the model.
"""

from __future__ import annotations

import contextlib
import copy
import random
import sys
import threading
import warnings
from collections import UserDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from nanguard.guard.rng import RandomStreams
from nanguard.replay.region import NoRegionError, Region
from nanguard.tracer.sites import is_installed, is_users

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import CodeType, FrameType

    from torch import Tensor

    from nanguard.replay.region import Piece

    Stack = list[tuple[FrameType, int]]


@dataclass(slots=True)
class _Call:
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


# Passes of a step that are kept beside those with a bad loss.
_KEPT = 3
# Model calls whose stacks are kept until the region of their step is known.
_CALLS = 8
_UNRECORDED = 2
# Backward passes with a start, for each region, after which all regions are taken to be known.
_SETTLED = 2
# Batches that a loader may be ahead of the loop, and one.
_AHEAD = 3
# Objects of the script whose attributes are remembered.
_OBJECTS = 8
# Bytes of a batch that is prepared in place, and so has to be copied before.
_SMALL = 64 << 20
# Batches that are remembered: all of a step that adds up the gradients of several, and a few,
# as loaders look ahead and a device tells late.
_MOST_BATCHES, _LEAST_BATCHES = 64, 4
# Tensors among the live-in names whose versions are compared.
_COMPARED = 64
_MODULE_CALL = nn.Module._call_impl.__code__
_LONG = hasattr(sys, "monitoring")


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
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES),
            torch.is_autocast_cache_enabled(),
            torch.get_default_dtype(),
            tuple(torch.overrides._get_current_function_mode_stack()),
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
                for device in _DEVICES:
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


_DEVICES = ("cuda", "cpu")


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
        stepped: Whether an optimizer was called since.
        site: The place of the backward that ended it; None while it goes on.
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
    stepped: bool = False
    site: Any = None
    reported: bool = False
    bad: bool = False
    later: Start | None = None

    @property
    def inexact(self) -> bool:
        """Whether a tensor was changed in place since, and nobody has a copy."""
        return any(
            kept is None and tensor._version != version for tensor, version, kept in self.versions
        )


class Starts:
    """Follows a run and knows what its step began with.

    Attributes:
        current: The step that is going on, or the one that has just ended.
        ended: The starts of all backward passes since the last step of an optimizer.
        why_not: Why there is no start, where there is none.
        streams: Takes and puts back the random streams.
    """

    def __init__(
        self, on_left: Callable[[Start, Any], None] | None = None, *, long: bool = _LONG
    ) -> None:
        """Prepares; nothing is followed before ``begin``.

        Args:
            on_left: Called with a step that was left before its backward pass, and the names that
                its code had then.
            long: Whether to wait for the first lines of regions.
        """
        self._on_left = on_left
        self.is_on = False
        self.current: Start | None = None
        self.ended: list[Start] = []
        self.why_not: str | None = None
        self.streams = RandomStreams([])
        self.batches: deque[tuple[Any, Any, list[int]]] = deque(maxlen=_MOST_BATCHES)
        # How many batches were handed out in the last two steps, and since then.
        self._drawn_in: deque[int] = deque(maxlen=2)
        self._drawn_since = 0
        self.paused = False
        self._long = long
        self._thread: int | None = None
        self._regions: dict[Any, tuple[Region, Piece]] = {}
        self._codes: dict[CodeType, Region] = {}
        self._calls: list[_Call] = []
        self._last_event: Stack = []
        self._hook: Any = None
        self._hooked: dict[type, Callable[[], None]] = {}
        self._compiled = False
        self._lines = _Lines(self._reached, self._called_first) if long else None
        self._earlier: dict[str, Any] | None = None
        self._objects: list[Any] = []
        self._earlier_objects: list[tuple[Any, dict[str, Any]]] = []
        # Whether calls were looked for ever since the last backward, and how many backward passes
        # in a row had a start.
        self._heard_all = False
        self._in_a_row = 0
        # The last batches as they were handed out, and whether batches are changed in place.
        self._given: deque[_Given] = deque(maxlen=_AHEAD)
        # The batches since the last step, and whether streams are taken as they are handed out.
        self._since: list[Any] = []
        self._taken_by_batch = False
        self._looked_for_streams = False
        self._moves = False

    @property
    def sees_models(self) -> bool:
        """Whether models are called in the steps, so that these are seen to begin."""
        return bool(self._regions)

    def begin(self) -> None:
        """Begins to follow."""
        self.is_on = True
        self._look_for_calls()

    def close(self) -> None:
        """Ends it; nothing of it is left."""
        self.is_on = False
        for undo in self._hooked.values():
            undo()
        self._hooked.clear()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if self._lines is not None:
            self._lines.close()
        self._forget_stacks()
        self.current, self.ended = None, []
        self.batches.clear()

    # What the run tells.

    def drew(self, loader: Any, batch: Any, indices: list[int]) -> None:
        """Notes a batch that a loader has handed out."""
        if not self.is_on:
            return
        self.batches.append((loader, batch, indices))
        self._drawn_since += 1
        self._since = [*self._since[-2:], batch]
        if not self._long:
            self._given.append(_Given(batch, copies=self._moves))
        if self.current is not None and self.current.site is None:
            self.current.given.append(batch)
            if self.current.later is not None:
                self.current.later.given.append(batch)
        elif not self._long and self._regions:
            self._earlier, self._taken_by_batch = self.streams.capture(), True

    def before_backward(self, losses: list[Tensor]) -> None:
        """Ends the start that is going on with a backward pass."""
        if not self.is_on or self.paused:
            return
        if not self._is_our_thread():
            return
        frame = _outside(sys._getframe(1))
        if frame is None:
            return
        site = (frame.f_code, frame.f_lasti)
        start = self.current
        if site not in self._regions or start is None:
            self._discover(site, frame)
        elif start.site == site and not self._goes_on(start):
            # The region began anew, and nobody noticed.
            self._look_for_calls()
            self.current = None
        if self.current is not None:
            self._end(self.current, site, losses)
        self._in_a_row = 0 if self.current is None else self._in_a_row + 1
        self._last_event = _stack_of(frame) if self._hook is not None else []
        self._heard_all = self._hook is not None
        self._calls.clear()

    def _is_our_thread(self) -> bool:
        """Returns whether this is the thread that trains; another one may come after it."""
        here = threading.get_ident()
        if self._thread in (None, here):
            return True
        if any(thread.ident == self._thread for thread in threading.enumerate()):
            return False
        self._thread, self.current, self.ended = None, None, []
        self._look_for_calls()
        return True

    def _goes_on(self, start: Start) -> bool:
        """Returns whether a second backward of the same place belongs to one start.

        It does if the first one was not the end of the region: a loop inside of it.
        """
        return start.stepped is False and self._lines is not None and not self._lines.fresh

    def _end(self, start: Start, site: Any, losses: list[Tensor]) -> None:
        if start not in self.ended:
            self.ended.append(start)
        # The first one began with the weights that all of the step begins with.
        good = [kept for kept in self.ended[1:-1] if not kept.bad]
        for spare in good[: max(len(good) - _KEPT + 1, 0)]:
            self.ended.remove(spare)  # of many passes for one step, the last ones are kept
        start.site = site
        start.losses += [loss.detach().clone() for loss in losses]
        if start.later is not None:
            start.later.site, start.later.losses = site, start.losses
        if any(t._version != version for t, version, kept in start.versions if kept is None):
            start.region.moves = True

    def after_backward(self) -> None:
        """Notes that the random streams have gone on."""
        self._freshen()

    def step_begins(self) -> None:
        """Notes that an optimizer was called."""
        for start in self.ended:
            start.stepped = True
            if start.later is not None:
                start.later.stepped = True

    def step_ended(self) -> list[Start]:
        """Forgets the step that is over; returns what it began with."""
        ended, self.ended = self.ended, []
        self.current, self._since = None, []
        self._drawn_in.append(self._drawn_since)
        self._drawn_since = 0
        while len(self.batches) > max(_LEAST_BATCHES, sum(self._drawn_in)):
            self.batches.popleft()
        self._calls.clear()
        if self._hook is not None:
            frame = _outside(sys._getframe(1))
            self._last_event = [] if frame is None else _stack_of(frame)
            if not self._compiled and self._in_a_row > _SETTLED * max(len(self._regions), 1):
                self._hook.remove()
                self._hook = None
                self._last_event = []
        if not self._regions and not self._looked_for_streams:
            # A script that never calls backward has no region that they would be learned with.
            self._looked_for_streams = True
            caller = _outside(sys._getframe(1))
            if caller is not None:
                self._know_streams(caller)
        if not self._long or not self._regions:
            # Where the step before had a batch, the next one has one, too.
            self._earlier = None if self._taken_by_batch else self.streams.capture()
            self._taken_by_batch = False
            self._earlier_objects = self._objects_now()
        self._freshen()
        return ended

    def _freshen(self) -> None:
        if self._lines is not None:
            self._lines.fresh = True

    # Finding regions.

    def _look_for_calls(self) -> None:
        if self._hook is None:
            # Our hook does nothing in compiled code.
            told = r"Using `torch\.compile\(module\)` when there are global hooks"
            warnings.filterwarnings("ignore", told, UserWarning)
            self._hook = register_module_forward_pre_hook(self._called)

    def _called(self, module: nn.Module, _args: Any) -> None:
        if self.paused or torch.compiler.is_compiling() or not self._is_our_thread():
            return
        frame = sys._getframe(1)
        if type(module).__name__ == "OptimizedModule":
            self._compiled = True
        if self._hook is not None and not _is_nested(frame):
            self._note_call(module, frame)
        if not self._long and self._codes:
            self._begins_with_call(frame)

    def _note_call(self, module: nn.Module, frame: FrameType) -> None:
        """Keeps the first calls that are recorded for backward, and few others, as of rollouts."""
        few = _CALLS if torch.is_grad_enabled() else _UNRECORDED
        kept = sum(call.ambient.grad is torch.is_grad_enabled() for call in self._calls)
        if kept < few and next(module.parameters(), None) is not None:
            self._calls.append(self._call(module, frame))

    def _call(self, module: nn.Module, frame: FrameType) -> _Call:
        if torch.cuda.is_initialized() and not self.streams.devices:
            self.streams = RandomStreams(_devices(), self.streams.generators)
        stack = _stack_of(frame)
        return _Call(
            module,
            {id(f): line for f, line in stack},
            {id(f): dict(f.f_locals) for f, _ in stack if is_users(f.f_code.co_filename)},
            self.streams.capture(),
            Ambient.now(),
            stack,
        )

    def _discover(self, site: Any, frame: FrameType) -> None:
        """Finds the region of a backward pass, if a model was seen to be called for it."""
        if not self._calls:
            self._look_for_calls()
            second = self.current is not None and self.current.site is not None
            if not (second and self._heard_all):  # else it is a second loss of the same forward
                self.current = self.after_the_fact(frame) if self._heard_all else None
            return
        owner, line, calls = self._common(frame)
        self.current = None
        if owner is None:
            self.why_not = "the model is called in another thread than backward"
            return
        try:
            # The innermost loop holds the call that belongs to this backward; of others, such as
            # those that collect data, it knows nothing.
            regions = [self._region(owner, call.lines[id(owner)], line) for call in calls]
            place = max(range(len(calls)), key=lambda n: (regions[n].first, -n))
            call = calls[place]
            self._add(site, owner, regions[place], call)
            piece = regions[place].at(call.lines[id(owner)])
        except NoRegionError as error:
            self.why_not = str(error)
            return
        local = call.names.get(id(owner), {})
        self.current = self._new(owner, local, regions[place], piece, call.streams, call.ambient)

    def _common(self, frame: FrameType) -> tuple[FrameType | None, int, list[_Call]]:
        """Returns the innermost frame that holds calls of models and this backward.

        Returns:
            The frame, the line that it calls backward on, and the calls; those that are recorded
            for backward, if there are any.
        """
        for f, line in _stack_of(frame):
            calls = [call for call in self._calls if id(f) in call.lines]
            if calls:
                trained = [call for call in calls if call.ambient.grad]
                return f, line, trained or calls
        return None, 0, []

    def _region(self, owner: FrameType, call: int, backward: int) -> Region:
        known = self._codes.get(owner.f_code)
        if known is not None and known.lines == (call, backward):
            return known
        return Region(owner.f_code, owner.f_globals, (call, backward))

    def after_the_fact(self, frame: FrameType | None, *, statement: bool = False) -> Start | None:
        """Returns a start of the code around a frame, with the values that its names have now.

        This is all there is where no model is called that could be seen: it is exact as long as
        the code has not changed what it was given.

        Args:
            frame: The frame, or one below it.
            statement: Whether to begin with the statement that it is at.
        """
        while frame is not None and is_installed(frame.f_code.co_filename):
            frame = _outside(frame.f_back)
        if frame is None:
            return None
        try:
            region = self._codes.get(frame.f_code)
            if region is None or not region.holds(frame.f_lineno or 0):
                region = Region(frame.f_code, frame.f_globals, (frame.f_lineno or 0,))
            piece = region.at(frame.f_lineno or 0) if statement else region.whole()
        except NoRegionError as error:
            self.why_not = str(error)
            return None
        self._know_streams(frame)
        local, now = frame.f_locals, self.streams.capture()
        return self._new(frame, local, region, piece, self._earlier or now, Ambient.now())

    def _add(self, site: Any, owner: FrameType, region: Region, call: _Call) -> None:
        line = call.lines[id(owner)]
        before = next((line for f, line in self._last_event if f is owner), None)
        piece = region.whole()
        if before is not None and region.holds(before) and before < line:
            # Another backward, or an optimizer, comes first in this region.
            piece = region.after(before) or piece
        self._thread = threading.get_ident()
        self._regions[site] = (region, piece)
        self._codes[owner.f_code] = region
        self._know_streams(owner)
        if self._lines is not None:
            self._lines.watch(region, piece)
            if not self._since:
                # Where the data comes from, nobody knows: perhaps it cannot be had a second time.
                self._lines.watch_call(region, region.at(line))
        elif type(call.module) not in self._hooked:
            self._hooked[type(call.module)] = _hear_calls(type(call.module), self._called)

    def _know_streams(self, frame: FrameType) -> None:
        """Learns which generators of its own the script draws from."""
        own = {id(g): g for g in self.streams.generators}
        places: list[Mapping[str, Any]] = [frame.f_locals]
        places += [vars(m) for m in list(sys.modules.values()) if _is_users_module(m)]
        owner = frame.f_locals.get("self")
        if hasattr(owner, "__dict__"):
            places.append(vars(owner))
        for place in places:
            for value in list(place.values()):
                # An environment or a sampler may have a generator of its own.
                inner = vars(value).values() if _is_plain_object(value) else ()
                own.update({id(v): v for v in (value, *inner) if _is_generator(v)})
        self.streams = RandomStreams(_devices(), list(own.values()))
        found = {id(v): v for place in places for v in list(place.values()) if _is_plain_object(v)}
        known = {id(v): v for v in self._objects}
        self._objects = list({**known, **found}.values())[:_OBJECTS]

    def _objects_now(self) -> list[tuple[Any, dict[str, Any]]]:
        """Returns the attributes of the script's own objects: counters, and what they count."""
        return [
            (owner, {name: copied(value) for name, value in vars(owner).items()})
            for owner in self._objects
        ]

    # Taking starts.

    def _reached(self, frame: FrameType, region: Region, piece: Piece) -> None:
        """Takes a start: the first line of a region is about to run."""
        if not self.paused and self._is_our_thread():
            self._take(frame, region, piece)

    def _called_first(self, frame: FrameType, region: Region, piece: Piece) -> None:
        """Takes a second start, where a model is about to be called in a step that goes on."""
        start = self.current
        if self.paused or start is None or start.site is not None or start.later is not None:
            return
        if start.frame == id(frame) and start.region is region and self._is_our_thread():
            now = self.streams.capture()
            start.later = self._new(frame, frame.f_locals, region, piece, now, Ambient.now())

    def _begins_with_call(self, frame: FrameType | None) -> None:
        """Takes a start if this is the first call of a model in a region."""
        while frame is not None and frame.f_code not in self._codes:
            frame = frame.f_back
        if frame is None:
            return
        region, line = self._codes[frame.f_code], frame.f_lineno or 0
        if not region.holds(line):
            return
        start = self.current
        if start is not None and start.site is None and self._is_same_turn(start, frame, line):
            return
        try:
            self._take(frame, region, region.at(line))
        except NoRegionError as error:
            self.why_not = str(error)
            self.current = None

    def _is_same_turn(self, start: Start, frame: FrameType, line: int) -> bool:
        """Returns whether a start is that of the turn of a loop, or call, that a frame is in."""
        if start.frame != id(frame):
            return False
        if not start.ambient.grad and torch.is_grad_enabled():
            return False  # what ran before was an evaluation, or a teacher
        if line > start.piece.last or line < start.piece.first:
            return False
        if line > start.piece.first:
            return True
        local = frame.f_locals
        return all(local.get(name) is value for name, value in start.names.items())

    def _take(self, frame: FrameType, region: Region, piece: Piece) -> None:
        local = frame.f_locals
        left = self.current
        same = left is not None and left.region is region and left.frame == id(frame)
        trains = left is not None and left.site is None and left.ambient.grad
        if left is not None and same and trains and self._on_left is not None:
            self._on_left(left, local)
        now = self.streams.capture()
        self.current = self._new(frame, local, region, piece, now, Ambient.now())

    def _new(
        self,
        frame: FrameType,
        local: Mapping[str, Any],
        region: Region,
        piece: Piece,
        streams: dict[str, Any],
        ambient: Ambient,
    ) -> Start:
        # What a function declares as global is not among its locals.
        found = {n: local if n in local else frame.f_globals for n in piece.live}
        names = {n: copied(place[n]) for n, place in found.items() if n in place}
        whole = None
        if not self._long and piece is not region.whole():
            whole = {n: copied(local[n]) for n in region.whole().live if n in local}
            whole.update(self._as_given(region, whole))
        elif not self._long and region.kind == "function":
            names.update(self._as_given(region, names))
        return Start(
            region,
            piece,
            names,
            whole,
            frame.f_globals,
            local.get("__class__"),
            streams,
            self._earlier,
            self._objects_now() if self._long else self._earlier_objects,
            {n: copied(local[n]) for n in frame.f_code.co_cellvars if n in local},
            {name: id(local[name]) for name in piece.stores if name in local},
            ambient,
            list(_versions(names, copies=region.moves)),
            id(frame),
            list(self._since),
        )

    def _as_given(self, region: Region, names: dict[str, Any]) -> dict[str, Any]:
        """Returns the batch as the loader has given it: the body may have changed it."""
        if not self._given:
            return {}
        # A loader may be a batch ahead of the loop, as Accelerate's is.
        given = next((g for g in self._given if g.is_among(names)), self._given[-1])
        self._moves = self._moves or given.moved
        batch = given.batch
        if isinstance(batch, (dict, UserDict)):
            # A step takes things out of it, as the Trainer's does with the labels.
            fits = [n for n, v in names.items() if _is_part(v, batch)]
            return {name: copied(batch) for name in fits}
        if not isinstance(batch, (list, tuple)):
            return {}
        for target in region.unpacked:
            if len(target) == len(batch) and all(name in names for name in target):
                return dict(zip(target, batch, strict=True))
        return {}

    def _forget_stacks(self) -> None:
        self._calls.clear()
        self._last_event = []


class _Lines:
    """Hears when the first line of a region is reached.

    Attributes:
        fresh: Whether a region that begins now is a new one, and not one that comes back to its
            first line: the end of a ``with`` block does.
    """

    def __init__(
        self,
        reached: Callable[[FrameType, Region, Piece], None],
        called: Callable[[FrameType, Region, Piece], None],
    ) -> None:
        self.fresh = True
        self._reached, self._called = reached, called
        self._watched: dict[tuple[CodeType, int], tuple[Region, Piece]] = {}
        self._calls: dict[tuple[CodeType, int], tuple[Region, Piece]] = {}
        self._headers: set[tuple[CodeType, int]] = set()
        self._tool: int | None = None

    def watch(self, region: Region, piece: Piece) -> None:
        """Waits for a piece from now on."""
        monitoring = sys.monitoring  # type: ignore[attr-defined]
        if self._tool is None:
            self._tool = next((n for n in (4, 3, 5) if monitoring.get_tool(n) is None), None)
            if self._tool is None:
                raise NoRegionError("all of Python's monitoring tools are in use")
            monitoring.use_tool_id(self._tool, "nanguard")
            monitoring.register_callback(self._tool, monitoring.events.LINE, self._line)
            monitoring.register_callback(self._tool, monitoring.events.PY_START, self._begins)
        self._watched[(region.code, piece.first)] = (region, piece)
        if region.header is not None:
            self._headers.add((region.code, region.header))
        events = monitoring.events.LINE | monitoring.events.PY_START
        monitoring.set_local_events(self._tool, region.code, events)
        # Lines that were switched off because nobody waited for them.
        monitoring.restart_events()

    def watch_call(self, region: Region, piece: Piece) -> None:
        """Waits for the first call of a model in a region, too."""
        if (region.code, piece.first) not in self._watched:
            self._calls[(region.code, piece.first)] = (region, piece)

    def close(self) -> None:
        """Stops waiting."""
        if self._tool is not None:
            monitoring = sys.monitoring  # type: ignore[attr-defined]
            for code, _ in self._watched:
                monitoring.set_local_events(self._tool, code, 0)
            monitoring.free_tool_id(self._tool)
            self._tool = None
        self._watched.clear()

    def _begins(self, _code: CodeType, _offset: int) -> Any:
        self.fresh = True

    def _line(self, code: CodeType, line: int) -> Any:
        key = (code, line)
        found = self._watched.get(key)
        if key in self._headers:
            self.fresh = True
            if found is None:
                return None
        call = self._calls.get(key)
        if call is not None:
            self._called(sys._getframe(1), *call)
            return None
        if found is None:
            return sys.monitoring.DISABLE  # type: ignore[attr-defined]
        if self.fresh or found[1].begins_once:
            self.fresh = False
            self._reached(sys._getframe(1), *found)
        return None


def _hear_calls(cls: type, hear: Callable[[Any, Any], None]) -> Callable[[], None]:
    """Makes calls of a class of modules known; returns what undoes it.

    A hook on the module itself would be saved with it, and copied.
    """
    own = vars(cls).get("__call__")

    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        hear(module, args)
        if own is not None:
            return own(module, *args, **kwargs)
        # Looked up each time: others replace it, too.
        return super(cls, module).__call__(*args, **kwargs)  # type: ignore[arg-type]

    setattr(cls, "__call__", call)  # noqa: B010 - a checker takes it for a mistake

    def undo() -> None:
        if vars(cls).get("__call__") is call:
            if own is None:
                delattr(cls, "__call__")
            else:
                setattr(cls, "__call__", own)  # noqa: B010

    return undo


def _stack_of(frame: FrameType | None) -> Stack:
    found: Stack = []
    while frame is not None:
        found.append((frame, frame.f_lineno or 0))
        frame = frame.f_back
    return found


def _outside(frame: FrameType | None) -> FrameType | None:
    """Returns the nearest frame that is neither torch's nor our own."""
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _is_nested(frame: FrameType | None) -> bool:
    """Returns whether a module is called by another one."""
    calls = 0
    while frame is not None:
        calls += frame.f_code is _MODULE_CALL
        if calls > 1:
            return True
        frame = frame.f_back
    return False


class _Given:
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


def _is_part(value: object, batch: dict[Any, Any] | UserDict[Any, Any]) -> bool:
    """Returns whether a value is a batch, or what is left of it."""
    return isinstance(value, (dict, UserDict)) and bool(value) and value.keys() <= batch.keys()


def _is_data(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_inference() and not value.requires_grad


def copied(value: Any) -> Any:
    """Returns a value as it is now: a step may take things out of a container that it is given."""
    if type(value) in (dict, list) and len(value) <= _COMPARED:
        return value.copy()
    if isinstance(value, UserDict):
        return copy.copy(value)
    return value


def _devices() -> list[torch.device]:
    """Returns the device that this process computes on, if it has begun to."""
    if not torch.cuda.is_initialized():
        return []
    return [torch.device("cuda", torch.cuda.current_device())]


def _is_generator(value: object) -> bool:
    kind = type(value)
    if kind is torch.Generator or kind is random.Random:
        return True
    known = kind.__name__ in ("Generator", "RandomState")
    return known and kind.__module__.startswith("numpy.random")


def _is_plain_object(value: object) -> bool:
    own = type(getattr(value, "__dict__", None)) is dict and not isinstance(value, nn.Module)
    return own and _is_users_module(sys.modules.get(type(value).__module__))


def _is_users_module(module: Any) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and is_users(file) and "site-packages" not in file


def _versions(names: dict[str, Any], *, copies: bool) -> Iterator[tuple[Tensor, int, Any]]:
    """Yields the tensors among some values, with their versions."""
    room, count = _SMALL if copies else 0, 0
    for value in names.values():
        inner = value.values() if type(value) is dict else value
        several = type(value) in (dict, list, tuple) and len(value) <= _COMPARED
        for tensor in inner if several else (value,):
            if not isinstance(tensor, torch.Tensor) or tensor.is_inference():
                continue
            if tensor.requires_grad or count == _COMPARED:
                continue
            count += 1
            size = tensor.numel() * tensor.element_size()
            kept = tensor.detach().clone() if size <= room else None
            room -= size if kept is not None else 0
            yield tensor, tensor._version, kept
