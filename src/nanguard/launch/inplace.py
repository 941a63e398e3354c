"""Replays in the process of the run itself: the loader gives out the bad batch again.

This is the way on CUDA, where a process cannot be forked. The loop's body runs once more for each
thing that is tried; its step is never made, and what it prints is not shown. The explanation runs
in a thread that asks for one replay after the other.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import queue
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._python_dispatch import _disable_current_modes

from nanguard.diagnosis.task import Outcome
from nanguard.guard.optimizers import hyperparameters, set_hyperparameters
from nanguard.launch import changes
from nanguard.launch.replay import Replay

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from torch.optim import Optimizer

    from nanguard.diagnosis.task import Task
    from nanguard.guard.gate import Ticket
    from nanguard.guard.rng import RandomStreams
    from nanguard.launch.following import Followed
    from nanguard.launch.live import Live
    from nanguard.launch.patches import Batches

    Run: TypeAlias = Live | Followed

# What cannot be changed in a run that goes on afterwards.
_IMPOSSIBLE = ("clip", "fresh_grads", "targets_only")


@dataclass
class Flight:
    """A step that the host has not seen yet.

    Attributes:
        ticket: Its numbers, on their way from the device; None if they are known.
        optimizer: Whose step it is.
        step: The step as this optimizer counts.
        ordinal: The step as all optimizers together count.
        drawn: The batches that belong to it.
        streams: The random streams as they were before it.
    """

    ticket: Ticket | None
    optimizer: Optimizer
    step: int
    ordinal: int
    drawn: list[tuple[Batches, Any]]
    streams: dict[str, Any] | None


class InPlace:
    """Gives out a bad batch again and again, as long as there is something to try."""

    def __init__(self, live: Run, flight: Flight, random: RandomStreams | None) -> None:
        self._live = live
        self._flight = flight
        self._random = random
        self._now = None if random is None else random.capture()
        self._tasks: queue.Queue[Task | None] = queue.Queue()
        self._outcomes: queue.Queue[Outcome] = queue.Queue()
        self._replay: _InPlaceReplay | None = None
        self._ended = False
        self._batches: list[Any] = []
        self._quiet = contextlib.ExitStack()
        self._rates: list[dict[str, Any]] = []
        self._schedules: list[tuple[LRScheduler, dict[str, Any]]] = []
        thread = threading.Thread(target=self._explain, name="nanguard-explains", daemon=True)
        thread.start()

    def next_batch(self) -> tuple[Any] | None:
        """Returns the next batch to be given out again, in a tuple; None when all is tried."""
        if self._batches:
            return (self._batches.pop(0),)
        self._end_replay()
        while True:
            task = self._tasks.get()
            if task is None:
                break
            impossible = next((n for n in _IMPOSSIBLE if getattr(task, n)), None)
            error = "this cannot be changed while the run goes on"
            if (
                impossible is None
                and task.lr_factor == 1.0
                and not _is_half_model(task, self._live)
            ):
                try:
                    if task.source:
                        self._quiet.enter_context(changes.swapped_code(task.source))
                    return self._begin_replay(task)
                except RuntimeError as refused:
                    error = str(refused)
            self._outcomes.put(Outcome(error=error))
        if self._random is not None and self._now is not None:
            self._random.restore(self._now)
        return None

    @property
    def left(self) -> int:
        """How many batches of this replay are still to be given out."""
        return len(self._batches)

    def end(self) -> None:
        """Ends it before everything is tried, as the loop was left."""
        self._end_replay()
        self._ended = True
        self._outcomes.put(Outcome(error="the loop was left"))

    def run(self, task: Task, seconds: float) -> Outcome | None:
        """Asks, from the thread that explains, for one replay."""
        if self._ended:
            return Outcome(error="the loop was left")
        self._tasks.put(task)
        try:
            return self._outcomes.get(timeout=seconds)
        except queue.Empty:
            return None

    def owns(self, batches: Batches) -> bool:
        """Returns whether the bad batch came from a loader."""
        return any(batches is own for own, _ in self._flight.drawn)

    def _explain(self) -> None:
        try:
            self._live.handover.explain_in_place(self, self._flight.ordinal)
        finally:
            self._tasks.put(None)

    def _begin_replay(self, task: Task) -> tuple[Any]:
        if self._random is not None and self._flight.streams is not None:
            self._random.restore(self._flight.streams)
        batches = [batch for _, batch in self._flight.drawn]
        if task.without:
            batches = [changes.without(batch, task.without) for batch in batches]
        task.target, task.without = self._live.ordinal, ()
        self._replay = _InPlaceReplay(task, self._live, self)
        self._quiet.enter_context(contextlib.redirect_stdout(io.StringIO()))
        self._quiet.enter_context(contextlib.redirect_stderr(io.StringIO()))
        if task.precision is not None:
            self._quiet.enter_context(changes.without_autocast())
        if self._live.held is not None:
            self._live.held.mark()
        self._rates = hyperparameters(self._live.optimizers())
        self._schedules = [(s, copy.deepcopy(s.state_dict())) for s in _schedulers()]
        self._live.patches.watcher = self._replay
        self._replay.begin()
        self._batches = batches[1:]
        return (batches[0],)

    def _end_replay(self) -> None:
        replay, self._replay = self._replay, None
        if replay is None:
            return
        if replay.trace is not None:
            replay.trace.stop()
        self._live.patches.watcher = self._live
        self._quiet.close()
        if self._live.held is not None:
            self._live.held.restore(self._live.held.shape)
        # The loop's body has stepped its schedules, too.
        set_hyperparameters(self._live.optimizers(), self._rates)
        for scheduler, state in self._schedules:
            scheduler.load_state_dict(state)
        for parameter in self._live.named_parameters().values():
            parameter.grad = None
        outcome = replay.outcome or Outcome(error="the loop's body did not come to a step")
        outcome.step, outcome.ordinal = self._flight.step, self._flight.ordinal
        self._outcomes.put(outcome)


class _InPlaceReplay(Replay):
    """A replay whose step is judged and never made."""

    def __init__(self, task: Task, live: Run, owner: InPlace) -> None:
        super().__init__(task, live)
        self._owner = owner
        self._live = live
        self.outcome: Outcome | None = None

    def begin(self) -> None:
        """Begins to watch, if that is the task."""
        if self.trace is not None:
            self.trace.step = self.ordinal
            self.trace.start()
            self.trace.begin_step(self.ordinal)

    def begin_pass(self, loader: Any) -> None:
        """Leaves other loaders as they are."""

    def next_batch(self, batches: Batches) -> Any:
        """Goes back to the run when the loop asks for another batch."""
        if self._owner.owns(batches):
            return self._live.next_batch(batches)
        return next(batches.own)

    def judged_step(self, optimizer: Optimizer, call: Callable[..., Any], closure: Any) -> Any:
        """Judges the step, and does not make it."""
        if self.answered:
            return None
        with _disable_current_modes():
            loss, gradient = self.verdict(optimizer)
            self._judge(loss or gradient, optimizer)
            if not self.answered:
                self.answer(self._outcome(optimizer))
        return None

    def answer(self, outcome: Outcome) -> None:
        """Remembers the answer; the loop's body goes on to its end."""
        if not self.answered:
            self.answered = True
            self.outcome = outcome

    def boundary(self) -> None:
        """Does nothing: the step was not made."""


def _schedulers() -> list[LRScheduler]:
    """Returns the learning-rate schedules that are alive."""
    return [o for o in gc.get_objects() if issubclass(type(o), LRScheduler)]


def _is_half_model(task: Task, live: Run) -> bool:
    if task.precision is None:
        return False
    return any(p.dtype in (torch.float16, torch.bfloat16) for p in live.named_parameters().values())
