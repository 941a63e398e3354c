"""Remembers, while a run goes on, what each of its steps began with.

For each place that calls ``backward`` the region of its step is found once, from two stacks: that
of the model's call and that of ``backward``. From then on the values of the region's live-in names
and the random streams are remembered whenever it begins. Where Python can tell that a line is
reached (``sys.monitoring``, 3.12 and later) that is the region's first line; elsewhere it is the
statement that first calls the model.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from nanguard.guard.rng import RandomStreams, devices_in_use
from nanguard.replay.frames import Lines, hear_calls, is_nested, let_go, outside, stack_of
from nanguard.replay.handed_on import CarriedTurns, generator_below, handed_to, numbers_in
from nanguard.replay.patches import comes_from_signal, is_capturing
from nanguard.replay.python_state import ScriptObjects
from nanguard.replay.region import NoRegionError, Region
from nanguard.replay.start import (
    Ambient,
    Given,
    ModelCall,
    Reader,
    Start,
    bytes_of,
    generators_in,
    loop_of,
    script_values,
)
from nanguard.replay.tracer.sites import is_installed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import CodeType, FrameType

    from torch import Tensor

    from nanguard.replay.frames import Stack
    from nanguard.replay.handed_on import Taking
    from nanguard.replay.made_before import Table
    from nanguard.replay.region import Piece

    # A place in code: its identity, and the instruction.
    Site = tuple[int, int]

# Passes of a step that are kept beside those with a bad loss.
_KEPT = 3
# Model calls whose stacks are kept until the region of their step is known.
_CALLS, _UNRECORDED = 8, 2
_SETTLED = 2  # backward passes with a start, for each region, after which all are known
_AHEAD = 3  # batches that a loader may be ahead of the loop, and one
# Batches that are remembered: a few, as loaders look ahead and a device tells late, and all of a
# step that adds up the gradients of several, as long as these do not take too many bytes.
_LEAST_BATCHES, _MOST_BATCHES, _BATCH_BYTES = 3, 64, 256 << 20
_LONG = hasattr(sys, "monitoring")


class Starts:
    """Follows a run and knows what its step began with.

    Attributes:
        current: The step that is going on, or the one that has just ended.
        ended: The starts of all backward passes since the last step of an optimizer.
        good: The starts of a good step, which shows what a repair does to such steps.
        why_not: Why there is no start, where there is none.
        streams: Takes and puts back the random streams.
        table: What made the bad value that a step was given last, where that is known.
        is_opening: Whether a loader has begun in the step that goes on.
        ahead: How many batches loaders are ahead of the loop.
    """

    def __init__(
        self,
        on_left: Callable[[Start, Any, Sequence[Any], bool], None] | None = None,
        *,
        models: Callable[[], list[nn.Module]] = list,
        long: bool = _LONG,
    ) -> None:
        """Prepares; nothing is followed before ``begin``.

        Args:
            on_left: Called with a step that was left before its backward pass, the names that its
                code had then, what a generator has handed on in it, and whether the next turn of
                its loop goes on with its graph.
            models: Returns the models that are trained.
            long: Whether to wait for the first lines of regions.
        """
        self._on_left = on_left
        self.is_on = False
        self.current: Start | None = None
        self.ended: list[Start] = []
        self.good: list[Start] = []
        self.why_not: str | None = None
        self.streams = RandomStreams([])
        self.table: Table | None = None
        self.batches: deque[tuple[Any, Any, list[int]]] = deque(maxlen=_MOST_BATCHES)
        # How many batches were handed out in the last two steps, since then, and in the step in
        # which a loader began: one that is ahead of the loop hands out more there.
        self._drawn_in: deque[int] = deque(maxlen=2)
        self._drawn_since = self._drawn_at_first = self.ahead = 0
        self.is_opening = False
        self.paused = False
        self._long = long
        self._thread: int | None = None
        # By the identity of code, which takes long to compare: the regions of the places that call
        # backward, each with the code that makes its key a safe one, and those of all code.
        self._regions: dict[Site, tuple[Region, CodeType]] = {}
        self._codes: dict[int, Region] = {}
        self._readers: dict[Piece, Reader] = {}
        self._calls: list[ModelCall] = []
        self._last_event: Stack = []
        self._loop: Stack = []  # which makes the steps of a script without a model, if known
        self._hook: Any = None
        self._hooked: dict[type, Callable[[], None]] = {}
        self._compiled = False
        hears = (self._reached, self._called_first, self._returned)
        self._lines = Lines(*hears) if long else None
        self._turns = CarriedTurns()
        self._earlier: dict[str, Any] | None = None
        self._objects = ScriptObjects(models)
        self._earlier_objects: list[tuple[Any, dict[str, Any]]] = []
        self._step_end: dict[str, Any] | None = None  # the random streams then
        self._heard_all = False  # whether calls were looked for ever since the last backward
        self._in_a_row = 0  # backward passes that had a start
        # The last batches as they were handed out, and whether batches are changed in place.
        self._given: deque[Given] = deque(maxlen=_AHEAD)
        self._moves = False
        # The batches since the last step, and whether streams are taken as they are handed out.
        self._since: list[Any] = []
        self._taken_by_batch = self._looked_for_streams = False

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
        self.current, self.ended, self.good = None, [], []
        self.batches.clear()

    # What the run tells.

    def drew(self, loader: Any, batch: Any, indices: list[int]) -> None:
        """Notes a batch that a loader has handed out."""
        if not self.is_on:
            return
        self.is_opening = self.is_opening or all(own is not loader for own, _, _ in self.batches)
        self.batches.append((loader, batch, indices))
        self._drawn_since += 1
        if self._drawn_since > _LEAST_BATCHES:
            self._forget_batches(_BATCH_BYTES // max(1, bytes_of(batch)))
        self._since = [*self._since[-2:], batch]
        if not self._long:
            self._given.append(Given(batch, copies=self._moves))
        start = self.current
        if start is not None and start.site is None:
            start.given.append(batch)
            if start.later is not None:
                start.later.given.append(batch)
        elif not self._long and self._regions:
            self._earlier, self._taken_by_batch = self.streams.capture(), True

    def _forget_batches(self, most: int) -> None:
        spare = len(self.batches) - max(_LEAST_BATCHES, most)
        for _ in range(spare):
            self.batches.popleft()

    def _count_batches(self) -> None:
        drawn, self._drawn_since, self._since = self._drawn_since, 0, []
        self._drawn_in.append(drawn)
        if self.is_opening:
            self._drawn_at_first, self.is_opening = drawn, False
        elif self._drawn_at_first:  # later on, steps at the end of the data may take fewer
            self.ahead, self._drawn_at_first = max(0, self._drawn_at_first - drawn), 0
        self._forget_batches(sum(self._drawn_in))

    def before_backward(self, losses: list[Tensor]) -> None:
        """Ends the start that is going on with a backward pass."""
        if not self.is_on or self.paused or not self._is_our_thread():
            return
        frame = outside(sys._getframe(1))
        if frame is None:
            return
        site = (id(frame.f_code), frame.f_lasti)
        start = self.current
        if site not in self._regions or start is None:
            self._discover(site, frame)
        elif start.site == site and not self._goes_on(start):
            # The region began anew, and nobody noticed.
            self._look_for_calls()
            self.current = None
        if self.current is None:
            self._in_a_row = 0
        else:
            self._in_a_row += 1
            self._end(self.current, site, losses)
            receiver = self.current.region.receiver
            if receiver is not None:
                self._taken(self.current, receiver.take(frame))
        self._heard_all = self._hook is not None
        if self._hook is not None or self._last_event:
            self._last_event = stack_of(frame) if self._hook is not None else []
        self._calls.clear()

    def _taken(self, start: Start, taking: Taking | None) -> None:
        start.taking = taking
        if start.later is not None:
            start.later.taking = taking

    def _is_our_thread(self) -> bool:
        """Returns whether this is the thread that trains; another one may come after it."""
        here = threading.get_ident()
        if self._thread == here or self._thread is None:
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

    def _end(self, start: Start, site: Site, losses: list[Tensor]) -> None:
        ended = self.ended
        if start not in ended:
            ended.append(start)
        if len(ended) > _KEPT:
            # The first one began with the weights that all of the step begins with.
            good = [kept for kept in ended[1:-1] if not kept.bad]
            for spare in good[: max(len(good) - _KEPT + 1, 0)]:
                ended.remove(spare)  # of many passes for one step, the last ones are kept
        start.site, start.only_asked, start.held = site, False, None
        start.add_losses(losses)
        self._turns.end(start)
        if start.later is not None:
            start.later.site, start.later.losses = site, start.losses
            start.later.turns = start.turns
        if start.inexact:
            start.region.moves = True
        if start.batches and not self._moves:
            self._moves = any(batch.has_moved for batch in start.batches)

    def after_backward(self) -> None:
        """Notes that the random streams have gone on."""
        if self._lines is not None:
            self._lines.fresh = True

    def step_begins(self) -> None:
        """Notes that an optimizer was called."""
        for start in self.ended:
            start.stepped = True
            if start.later is not None:
                start.later.stepped = True

    def step_ended(self) -> list[Start]:
        """Forgets the step that is over; returns what it began with."""
        ended, self.ended = self.ended, []
        for start in ended:
            if start.lost_losses:
                start.region.changes_losses = True
        self.current = None
        if self._since:
            self._count_batches()
        if self._hook is not None:
            self._calls.clear()
            frame = outside(sys._getframe(1))
            self._last_event = [] if frame is None else stack_of(frame)
            if not self._compiled and self._in_a_row > _SETTLED * max(len(self._regions), 1):
                self._hook.remove()
                self._hook = None
                self._last_event = []
        if not self._regions and not self._looked_for_streams:
            # A script that never calls backward has no region that they would be learned with.
            self._looked_for_streams = True
            caller = outside(sys._getframe(1))
            if caller is not None:
                self._know_streams(caller)
        self._objects.step_ended()
        if not self._long or not self._regions:
            # Where the step before had a batch, the next one has one, too.
            self._earlier = None if self._taken_by_batch else self.streams.capture()
            self._taken_by_batch = False
            self._earlier_objects = self._objects.now()
        else:
            self._step_end = self.streams.capture()
        self.after_backward()
        return ended

    # Finding regions.

    def _look_for_calls(self) -> None:
        if self._hook is None:
            # Our hook does nothing in compiled code.
            told = r"Using `torch\.compile\(module\)` when there are global hooks"
            warnings.filterwarnings("ignore", told, UserWarning)
            self._hook = register_module_forward_pre_hook(self._called)

    def _called(self, module: nn.Module, _args: Any) -> None:
        if not self.is_on or self.paused or torch.compiler.is_compiling():
            return
        if not self._is_our_thread() or is_capturing():
            return
        frame = sys._getframe(1)
        if type(module).__name__ == "OptimizedModule":
            self._compiled = True
        if self._hook is not None and not is_nested(frame):
            self._safely(self._note_call, module, frame)
        if not self._long and self._codes:
            self._safely(self._begins_with_call, frame)

    def _safely(self, take: Callable[..., None], *given: Any) -> None:
        """Takes a start, in the middle of the script, which must not end with an error of ours."""
        try:
            take(*given)
        except Exception as error:  # whatever it is: the run stays guarded, and goes unexplained
            if comes_from_signal(error):
                raise
            self.is_on, self.current = False, None
            self.why_not = f"what its steps began with could not be remembered: {error!r}"

    def _note_call(self, module: nn.Module, frame: FrameType) -> None:
        """Keeps the first calls that are recorded for backward, and few others, as of rollouts."""
        few = _CALLS if torch.is_grad_enabled() else _UNRECORDED
        kept = sum(call.ambient.grad is torch.is_grad_enabled() for call in self._calls)
        if kept < few and next(module.parameters(), None) is not None:
            if torch.cuda.is_initialized() and not self.streams.devices:
                self.streams = RandomStreams(devices_in_use(), self.streams.generators)
            self._calls.append(ModelCall.now(module, frame, self.streams.capture()))

    def _discover(self, site: Site, frame: FrameType) -> None:
        """Finds the region of a backward pass, if a model was seen to be called for it."""
        if not self._calls:
            self._look_for_calls()
            second = self.current is not None and self.current.site is not None
            if not (second and self._heard_all):  # else it is a second loss of the same forward
                self.current = self.after_the_fact(frame) if self._heard_all else None
                self._loop = loop_of(self.current, frame)
            return
        owner, line, calls = self._common(frame)
        self.current = None
        if owner is None:
            self.why_not = "the model is called in another thread than backward"
            return
        try:
            # The innermost loop holds the call that belongs to this backward; of others, such as
            # those that collect data, it knows nothing.
            found = [self._region(owner, call, line) for call in calls]
            place = max(range(len(calls)), key=lambda n: (found[n][1].first, -n))
            call, (owner, region) = calls[place], found[place]
            self._add((site, frame.f_code), owner, region, call)
            piece = region.at(call.lines[id(owner)])
        except NoRegionError as error:
            self.why_not = str(error)
            return
        local = call.names.get(id(owner), {})
        self.current = self._new(owner, local, region, piece, call.streams, call.ambient)

    def _common(self, frame: FrameType) -> tuple[FrameType | None, int, list[ModelCall]]:
        """Returns the innermost frame that holds calls of models and this backward.

        Returns:
            The frame, the line that it calls backward on, and the calls; those that are recorded
            for backward, if there are any.
        """
        for f, line in stack_of(frame):
            calls = [call for call in self._calls if id(f) in call.lines]
            if calls:
                trained = [call for call in calls if call.ambient.grad]
                return f, line, trained or calls
        return None, 0, []

    def _region(self, owner: FrameType, call: ModelCall, backward: int) -> tuple[FrameType, Region]:
        """Returns the region of a step, and the frame whose code it is a part of."""
        lines, receiver = (call.lines[id(owner)], backward), None
        below = generator_below(call.frames, owner)
        if below is not None:
            receiver = handed_to(owner, *lines)
        if below is not None and receiver is not None:
            owner = below[0]
            lines = (below[1], owner.f_lineno or 0)
        known = self._codes.get(id(owner.f_code))
        if known is not None and known.lines == lines:
            return owner, known
        return owner, Region(owner.f_code, owner.f_globals, lines, receiver)

    def after_the_fact(
        self, frame: FrameType | None, *, line: int | None = None, statement: bool = False
    ) -> Start | None:
        """Returns a start of the code around a frame, with the values that its names have now.

        This is all there is where no model is called that could be seen: it is exact as long as
        the code has not changed what it was given.

        Args:
            frame: The frame, or one below it.
            line: A line of the code that is meant; None for the one that the frame is on.
            statement: Whether to begin with the statement that it is at.
        """
        while frame is not None and is_installed(frame.f_code.co_filename):
            frame = outside(frame.f_back)
        if frame is None:
            return None
        line = (frame.f_lineno or 0) if line is None else line
        try:
            region = self._codes.get(id(frame.f_code))
            if region is None or not region.holds(line):
                region = Region(frame.f_code, frame.f_globals, (line,))
            piece = region.at(line) if statement else region.whole()
        except NoRegionError as error:
            self.why_not = str(error)
            return None
        self._know_streams(frame)
        local, now = frame.f_locals, self.streams.capture()
        # What draws random numbers after a step, as an evaluation does, began at its end.
        streams = self._earlier or self._step_end or now
        start = self._new(frame, local, region, piece, streams, Ambient.now())
        start.earlier = self._earlier or (now if self._step_end is not None else None)
        let_go(frame, local)
        return start

    def _add(
        self, at: tuple[Site, CodeType], owner: FrameType, region: Region, call: ModelCall
    ) -> None:
        site, code = at
        line = call.lines[id(owner)]
        before = next((line for f, line in self._last_event if f is owner), None)
        piece = region.whole()
        if before is not None and region.holds(before) and before < line:
            # Another backward, or an optimizer, comes first in this region.
            piece = region.after(before) or piece
        self._thread = threading.get_ident()
        self._regions[site] = (region, code)
        self._codes[id(owner.f_code)] = region
        self._know_streams(owner)
        if self._lines is not None:
            self._lines.watch(region, piece)
            if not self._since:
                # Where the data comes from, nobody knows: perhaps it cannot be had a second time.
                self._lines.watch_call(region, region.at(line))
        elif type(call.module) not in self._hooked:
            self._hooked[type(call.module)] = hear_calls(type(call.module), self._called)

    def _know_streams(self, frame: FrameType) -> None:
        """Learns which generators of its own the script draws from, and which objects it has."""
        values = script_values(frame)
        own = {id(g): g for g in (*self.streams.generators, *generators_in(values))}
        self.streams = RandomStreams(devices_in_use(), list(own.values()))
        self._objects.know(values)

    # Taking starts.

    def _reached(self, frame: FrameType, region: Region, piece: Piece) -> None:
        """Takes a start: the first line of a region is about to run."""
        if self.is_on and not self.paused and self._is_our_thread():
            self._safely(self._take, frame, region, piece)

    def _called_first(self, frame: FrameType, region: Region, piece: Piece) -> None:
        """Takes a second start, where a model is about to be called in a step that goes on."""
        start = self.current
        if self.paused or start is None or start.site is not None or start.later is not None:
            return
        if start.frame == id(frame) and start.region is region and self._is_our_thread():
            self._safely(self._take_later, start, frame, piece)

    def _take_later(self, start: Start, frame: FrameType, piece: Piece) -> None:
        now, local = self.streams.capture(), frame.f_locals
        start.later = self._new(frame, local, start.region, piece, now, Ambient.now())
        let_go(frame, local)

    def _begins_with_call(self, frame: FrameType | None) -> None:
        """Takes a start if this is the first call of a model in a region."""
        codes = self._codes
        while frame is not None and id(frame.f_code) not in codes:
            frame = frame.f_back
        if frame is None:
            return
        region, line = codes[id(frame.f_code)], frame.f_lineno or 0
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
        same = all(local.get(name) is value for name, value in start.names.items())
        let_go(frame, local)
        return same

    def _take(self, frame: FrameType, region: Region, piece: Piece) -> None:
        local, left = frame.f_locals, self.current
        now = self.streams.capture()
        start = self.current = self._new(frame, local, region, piece, now, Ambient.now())
        start.held = frame if start.ambient.grad else None
        if left is not None and left.region is region and left.site is None and left.ambient.grad:
            self._left(left, frame, local)
        let_go(frame, local)

    def _left(self, turn: Start, frame: FrameType, local: Mapping[str, Any]) -> None:
        """Looks at a turn that was left before a backward pass, as the next one begins."""
        assert self.current is not None  # noqa: S101 - it is the next one
        if turn.frame != id(frame) and turn.region.kind == "loop":
            return
        carried = self._turns.left(turn, local, self.current)
        if turn.frame == id(frame) and self._on_left is not None:
            receiver = turn.region.receiver
            given = () if receiver is None else receiver.given_in(frame)
            self._on_left(turn, local, given, carried)

    def _returned(self, frame: FrameType) -> None:
        """Looks at a step whose function has returned before a backward pass."""
        start = self.current
        if start is None or start.held is not frame:
            return
        start.held = None
        if self._on_left is not None and not self.paused:
            kept = bool(numbers_in({}, self._objects.now()))
            self._safely(self._on_left, start, frame.f_locals, (), kept)

    def unfinished(self) -> Stack:
        """Returns the frames that a step was left in before its backward pass, innermost first.

        They may have ended since. Where no region is known, they are those that were last seen,
        each with the line that it was on then.
        """
        if self.current is not None:
            held = self.current.held
            return [] if held is None else [(held, held.f_lineno or 0)]
        return self._calls[-1].frames if self._calls else self._last_event or self._loop

    def _new(
        self,
        frame: FrameType,
        local: Mapping[str, Any],
        region: Region,
        piece: Piece,
        streams: dict[str, Any],
        ambient: Ambient,
    ) -> Start:
        reader = self._readers.get(piece)
        if reader is None:
            whole = None if self._long else region.whole().live
            reader = self._readers[piece] = Reader(piece.live, whole)
        taken = reader.take(local, frame.f_globals)
        start = Start(region, piece, taken, frame, local, streams, ambient)
        start.earlier = self._earlier
        start.step_end = self._step_end if self._long else self._earlier
        start.objects = start.earlier_objects = self._objects.now()
        if not self._long:
            start.earlier_objects, start.batches = self._earlier_objects, tuple(self._given)
        start.drawn = self._since
        return start

    def _forget_stacks(self) -> None:
        self._calls.clear()
        self._last_event, self._loop = [], []
