"""Replays a step in the process that trains, from what it began with.

The optimizer was held back, so parameters and optimizer state are those that the step began with.
What has to be done again is a piece of Python that is still there. It is called with the names and
random streams that were remembered, with something changed if that is to be tried, and it ends
where the step would have been made. Afterwards the run is as if nobody had looked.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import sys
import threading
import traceback
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from nanguard.diagnosis.task import Outcome, Task
from nanguard.guard.held import BufferPlaces, Held
from nanguard.guard.optimizers import hyperparameters, set_hyperparameters
from nanguard.numerics import all_finite
from nanguard.replay import changes
from nanguard.replay.data import data_origin
from nanguard.replay.region import NoRegionError
from nanguard.replay.replay import Replay
from nanguard.replay.sandbox import Outside
from nanguard.replay.state import Reachable, RefusedError, spare
from nanguard.replay.watch import single_number
from nanguard.tracer.sites import is_installed, is_users
from nanguard.tracer.symptom import Symptom

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor
    from torch.optim import Optimizer

    from nanguard.replay.patches import Patches
    from nanguard.replay.start import Start, Starts
    from nanguard.replay.watch import Watch

    Apply = Callable[[Watch, Optimizer, Callable[..., Any]], dict[str, float]]

# What needs the steps before this one, which are gone.
_HISTORY = ("clip", "fresh_grads")


class Reached(BaseException):
    """Leaves a replay where its step would have been made."""


class TooLong(BaseException):
    """Leaves a replay that does not come to an end."""


class InPlace:
    """Replays one bad step, as often as there is something to try.

    Attributes:
        wants_history: Whether something was asked for that only a second run can show.
        differs: Whether every unchanged replay gave another loss than the run's.
    """

    method = "in-place"

    def __init__(
        self,
        run: Watch,
        patches: Patches,
        starts: Starts,
        candidates: list[Start],
        *,
        step: int,
        ordinal: int,
        together: bool = False,
        unfinished: bool = False,
        reads: bool = False,
    ) -> None:
        """Prepares for replays.

        Args:
            run: Knows the models and optimizers.
            patches: What makes torch tell a watcher what happens.
            starts: What remembers starts.
            candidates: What the passes of the bad step began with; the likeliest first.
            step: The number of the step as its optimizer counts.
            ordinal: The same, as all optimizers together count.
            together: Whether all ranks replay in lockstep, and so all of a step.
            unfinished: Whether the script left the step before a backward pass.
            reads: Whether it ends where the script reads a bad number: an evaluation.
        """
        self._run, self._patches, self._starts = run, patches, starts
        self._candidates = candidates
        self._step, self._ordinal = step, ordinal
        self._together, self._unfinished, self._reads = together, unfinished, reads
        self._chosen: tuple[Start, dict[str, Any]] | None = None
        self._reachable: dict[int, Reachable] = {}
        # Tells other ranks of each replay, where they have to take part in it.
        self.announce: Callable[[Task, int, int], None] | None = None
        self.wants_history = False
        self.differs = False

    def run(self, task: Task, seconds: float) -> Outcome | None:
        """Replays the step with the changes of a task."""
        if task.lr_factor != 1.0 or any(getattr(task, name) for name in _HISTORY):
            self.wants_history = True
            return Outcome(error="only a second run can go through the steps before this one")
        if self._together and task.precision is not None:
            return Outcome(error="a model that lies on several ranks is not made wider")
        task = replace(task, target=self._run.ordinal, skipped=())
        if self._chosen is None:
            return self._settle(task, seconds)
        start, streams = self._chosen
        return self._replay(task, start, streams, seconds)[0]

    def make(self, apply: Apply, *, exactly: bool) -> dict[str, float] | None:
        """Makes a step again, for good; returns its numbers, or None if that could not be done.

        Args:
            apply: Judges and makes the step, and returns its numbers.
            exactly: Whether its losses have to be those that it had.
        """
        made = None
        gradients = self._set_aside_gradients()
        for start in self._candidates:
            if start.inexact:
                break
            task = Task(self._run.ordinal)
            replay = _Made(task, self._run, start, apply, exactly=exactly)
            with self._as_before(start, start.streams, leave_tensors=True) as stack:
                error = self._call(replay, task, start, stack, math.inf)
            if error is not None or not replay.answered:
                break
            made = replay.numbers
        for parameter, gradient in gradients:
            parameter.grad = gradient
        return made

    def _set_aside_gradients(self) -> list[tuple[Tensor, Tensor | None]]:
        found = [(p, p.grad) for p in self._run.named_parameters().values()]
        for parameter, _ in found:
            parameter.grad = None
        return found

    def _settle(self, task: Task, seconds: float) -> Outcome:
        """Finds the start from which the unchanged replay is exact; returns that replay."""
        errors: list[str] = []
        plain = replace(task, trace=True)
        for start, streams in self._variants():
            outcome, losses = self._replay(plain, start, streams, seconds)
            if outcome.error is not None:
                errors.append(outcome.error)
                continue
            if not _same(start.losses, losses, loosely=changes.is_compiled()):
                again = self._replay(plain, start, streams, seconds)[1]
                if outcome.symptom is None and not _same(losses, again):
                    return outcome  # two replays of the same differ from each other
                errors.append(_DIFFERS)
                continue
            if outcome.symptom is None:
                # A pass of the step that was good.
                errors.append("no pass of the step is bad by itself, only all of them together")
                continue
            if self._reads and start is not self._candidates[-1] and _came_in(outcome):
                continue  # the number was made further out
            self._chosen = (start, streams)
            return outcome
        self.differs = bool(errors) and all(error == _DIFFERS for error in errors)
        reason = errors[0] if errors else "nobody has seen what the step began with"
        return Outcome(error=reason, differs=self.differs)

    def is_exact(self) -> bool:
        """Returns whether a good step comes out bit for bit when it is replayed."""
        for start, streams in self._variants():
            outcome, losses = self._replay(Task(self._run.ordinal), start, streams, math.inf)
            if outcome.error is None and losses and _same(start.losses, losses):
                return True
        return False

    def replay(self, task: Task, start: int, variant: int) -> None:
        """Takes part in a replay of another rank's.

        Args:
            task: What to do.
            start: Which of the candidates to begin from.
            variant: With which of its random streams.
        """
        if start < len(self._candidates):
            chosen = self._candidates[start]
            streams = chosen.earlier if variant and chosen.earlier else chosen.streams
            self._replay(task, chosen, streams, math.inf)

    def _variants(self) -> Iterator[tuple[Start, dict[str, Any]]]:
        for start in self._candidates:
            yield start, start.streams
            if start.earlier is not None:
                yield start, start.earlier

    def _replay(
        self, task: Task, start: Start, streams: dict[str, Any], seconds: float
    ) -> tuple[Outcome, list[Tensor]]:
        if self.announce is not None:
            variant = int(streams is not start.streams)
            self.announce(task, self._candidates.index(start), variant)
        replay = InPlaceReplay(task, self._run, start, together=self._together, reads=self._reads)
        replay.indices, replay.drawn = [], [(b, i) for _, b, i in self._starts.batches]
        with self._as_before(start, streams) as stack:
            error = self._call(replay, task, start, stack, seconds)
        outcome = replay.outcome
        if outcome is None:
            outcome = Outcome(error=error or "the step's code ended before its backward pass")
        outcome.step, outcome.ordinal = self._step, self._ordinal
        if task.trace and outcome.origin is not None and not task.heal:
            data_origin(outcome, self._starts.batches, self._starts.streams)
        return outcome, replay.losses

    def _call(
        self,
        replay: InPlaceReplay,
        task: Task,
        start: Start,
        stack: contextlib.ExitStack,
        seconds: float,
    ) -> str | None:
        """Runs the step's code; returns why it did not come to its end, if so."""
        self._patches.watcher = replay
        again = list(start.given)
        replay.again = again
        names = {name: spare(value, given=bool(again)) for name, value in start.names.items()}
        seen: dict[str, Any] = {}
        piece = start.piece
        try:
            if task.source:
                path = start.piece.code.co_filename
                text = task.source.get(path)
                if text is not None:
                    piece = start.region.changed(piece, text)
                codes = changes.swapped_code(task.source, own=start.region.code)
                stack.enter_context(codes)
            if task.precision is not None:
                wide = getattr(torch, task.precision)
                stack.enter_context(changes.wider(wide, self._run))
            if task.without:
                again[:] = [changes.without(b, task.without) for b in again]
                replaced = changes.replaced_samples(task.without, targets_only=task.targets_only)
                stack.enter_context(replaced)
            stack.enter_context(start.ambient.entered(autocast=task.precision is None))
            stack.enter_context(_limited(seconds))
            stack.enter_context(replay.watching())
            piece.call(start.module, names, start.cls, seen.update)
        except Reached:
            return None
        except TooLong:
            return "the replay did not come to an end in its time"
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the script raises
            if self._unfinished and not isinstance(error, (NoRegionError, RefusedError)):
                replay.left(seen)
            return _in_words(error)
        if self._unfinished:
            replay.left(seen)
        else:
            replay.ended(complete=self._reads)
        return None

    @contextlib.contextmanager
    def _as_before(
        self, start: Start, streams: dict[str, Any], *, leave_tensors: bool = False
    ) -> Iterator[contextlib.ExitStack]:
        """Makes the run what it was before the step, and afterwards what it is now.

        Args:
            start: What the step began with.
            streams: The random streams it began with.
            leave_tensors: Whether gradients and buffers stay as the step makes them.
        """
        run, starts = self._run, self._starts
        reachable = self._reach(start)
        held = Held(BufferPlaces(run.models()))
        held.mark()
        gradients = [] if leave_tensors else self._set_aside_gradients()
        rates = hyperparameters(run.optimizers())
        now = starts.streams.capture()
        watcher = self._patches.watcher
        starts.paused = True
        try:
            with torch.no_grad():
                for tensor, version, kept in start.versions:
                    if kept is not None and tensor._version != version:
                        tensor.copy_(kept)
            starts.streams.restore(streams)
            with contextlib.ExitStack() as outer:
                outer.enter_context(Outside())
                outer.enter_context(changes.quiet())
                outer.enter_context(changes.eagerly())
                if not self._together:
                    outer.enter_context(changes.alone())
                with contextlib.ExitStack() as inner:
                    yield inner
        finally:
            self._patches.watcher = watcher
            with _disable_current_modes():
                for parameter, gradient in gradients:
                    parameter.grad = gradient
                if not leave_tensors:
                    held.restore(held.shape)
                set_hyperparameters(run.optimizers(), rates)
                reachable.put_back(tensors=not leave_tensors)
            starts.streams.restore(now)
            starts.paused = False

    def _reach(self, start: Start) -> Reachable:
        known = self._reachable.get(id(start))
        if known is None:
            modules = [
                vars(module)
                for module in list(sys.modules.values())
                if isinstance(file := getattr(module, "__file__", None), str)
                and is_users(file)
                and not is_installed(file)
            ]
            known = self._reachable[id(start)] = Reachable(
                [*start.names.values(), *self._run.optimizers()], modules
            )
        return known


_DIFFERS = "what was replayed is not what ran: its loss is another one"


class InPlaceReplay(Replay):
    """A replay whose step is judged and never made.

    Attributes:
        outcome: What it came to; None as long as it has not.
        again: Batches that loaders hand out once more.
    """

    def __init__(
        self, task: Task, run: Watch, start: Start, *, together: bool, reads: bool = False
    ) -> None:
        super().__init__(task, run)
        self._start = start
        self._reads = reads
        # Bad gradients that were handed to the script.
        self.handed: list[Tensor] = []
        self._together = together
        self.outcome: Outcome | None = None
        self.again: list[Any] = []
        self.facts.losses = [x for x in run.recent_losses if math.isfinite(x)]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watches every operation, if that is the task."""
        if self.trace is None:
            yield
            return
        self.trace.step = self.ordinal
        self.trace.start()
        self.trace.begin_step(self.ordinal)
        try:
            yield
        finally:
            self.trace.stop()

    def begin_pass(self, loader: Any) -> None:
        """Leaves loaders as they are."""

    def next_batch(self, own: Any, draw: Callable[[], Any]) -> Any:
        """Hands out a batch of the step once more."""
        if not self.again:
            raise RefusedError("the step takes another batch from its loader than it did")
        return self.again.pop(0)

    def before_backward(self, losses: list[Tensor]) -> None:
        """Ends the replay at a bad loss, whose origin lies in the forward pass."""
        super().before_backward(losses)
        if self._together:
            return  # the other ranks go on to their collectives
        with _disable_current_modes():
            self._judge(self.bad_loss(), self._optimizer())
        self._leave()

    def after_backward(self) -> None:
        """Ends the replay at a bad gradient, or when all passes of the step are over."""
        if self.trace is not None:
            self.trace.end_backward()
        last = len(self.losses) >= len(self._start.losses)
        with _disable_current_modes():
            if self._together:
                self._judge(self.bad_loss(), self._optimizer())
            if not self.answered and self._scaler is None:
                self._judge(self.bad_manual_gradient(), self._optimizer())
            if not self.answered and last and not self._start.stepped:
                self.answer(self._outcome(self._optimizer()))
        self._leave()

    def grad(self, call: Callable[[], Any], outputs: Any) -> Any:
        """Judges gradients that the script applies by itself."""
        loss = single_number(outputs)
        if loss is None or len(self.losses) >= len(self._start.losses):
            return call()
        self.losses.append(loss)
        self.before_backward([loss])
        found = call()
        if self.trace is not None:
            self.trace.end_backward()
        with _disable_current_modes():
            bad = [g for g in found if g is not None and not all_finite([g])]
            if bad:
                self.handed = bad
                self._judge(Symptom("gradient", "nan", float(loss)), self._optimizer())
            if not self.answered and len(self.losses) >= len(self._start.losses):
                self.answer(self._outcome(self._optimizer()))
        self._leave()
        return found

    def read(self, tensor: Tensor, value: float) -> None:
        """Ends the replay of an evaluation at the number that was bad."""
        if not self._reads or self.answered:
            return
        self._reads = False  # what is read from now on is read by us
        with _disable_current_modes():
            self.losses = [tensor.detach()]
            self._judge(self.bad_loss(), self._optimizer())
        self._leave()

    def judged_step(self, optimizer: Optimizer, call: Callable[..., Any], closure: Any) -> Any:
        """Judges the step, and does not make it."""
        if callable(closure):
            with torch.enable_grad():
                closure()
        with _disable_current_modes():
            self.facts.step_site = self.facts.step_site or None
            loss, gradient = self.verdict(optimizer)
            self._judge(loss or gradient, optimizer, by_hand=self._scaler is not None)
            if not self.answered:
                self.answer(self._outcome(optimizer))
        self._leave()

    def judged_scaler_step(self, scaler: Any, optimizer: Any, call: Callable[[], Any]) -> Any:
        """Judges the loss; the gradients are the scaler's own business."""
        with _disable_current_modes():
            self._judge(self.bad_loss(), optimizer)
            if not self.answered:
                self.answer(self._outcome(optimizer))
        self._leave()

    def ended(self, *, complete: bool) -> None:
        """Ends a replay whose region is over, and whose step is made by somebody else.

        Args:
            complete: Whether nothing else was to come.
        """
        if complete or (self.losses and len(self.losses) >= len(self._start.losses)):
            with _disable_current_modes():
                self.answer(self._outcome(self._optimizer()))

    def left(self, seen: dict[str, Any]) -> None:
        """Judges a step that its script has left without a backward pass.

        Args:
            seen: The names that the step's code had when it ended.
        """
        with _disable_current_modes():
            if not self.losses:
                self.losses = scalars_in(seen)
            self._judge(self.bad_loss(), self._optimizer())
            if not self.answered:
                self.answer(self._outcome(self._optimizer()))

    def answer(self, outcome: Outcome) -> None:
        """Keeps the answer."""
        if not self.answered:
            self.answered = True
            self.outcome = outcome

    def boundary(self) -> None:
        """Does nothing: the step was not made."""

    def at_boundary(self) -> None:
        """Does nothing: the step begins where it began."""

    def _optimizer(self) -> Any:
        return next(iter(self.optimizers()), None)

    def _leave(self) -> None:
        if self.answered:
            raise Reached


class _Made(InPlaceReplay):
    """A replay whose step is made.

    Attributes:
        numbers: Those of the step.
    """

    def __init__(
        self, task: Task, run: Watch, start: Start, apply: Apply, *, exactly: bool
    ) -> None:
        super().__init__(task, run, start, together=False)
        self._apply = apply
        self._exactly = exactly
        self.numbers: dict[str, float] | None = None

    def before_backward(self, losses: list[Tensor]) -> None:
        """Lets backward run, whatever the loss is."""

    def after_backward(self) -> None:
        """Leaves a pass of the step that no optimizer follows."""
        if len(self.losses) >= len(self._start.losses) and not self._start.stepped:
            self.answered = True
        self._leave()

    def judged_step(self, optimizer: Optimizer, call: Callable[..., Any], closure: Any) -> Any:
        """Makes the step."""
        if not self._exactly or _same(self._start.losses, self.losses):
            self.numbers = self._apply(self, optimizer, call)
            self.answered = True
        raise Reached


def _came_in(outcome: Outcome) -> bool:
    return outcome.origin is None or outcome.origin.op in ("input", "parameter")


def scalars_in(names: dict[str, Any]) -> list[Tensor]:
    """Returns the single numbers among some names that a graph leads to, bad ones first."""
    found = [
        value.detach()
        for value in names.values()
        if issubclass(type(value), torch.Tensor)
        and value.numel() == 1
        and value.is_floating_point()
    ]
    return sorted(found, key=lambda value: bool(torch.isfinite(value).all()))[:1]


def _same(left: list[Tensor], right: list[Tensor], *, loosely: bool = False) -> bool:
    """Returns whether two lists of losses are equal, bit for bit; the shorter one counts.

    Args:
        left: Losses.
        right: Others.
        loosely: Whether finite ones may differ: compiled code rounds differently.
    """
    pairs = list(zip(left, right, strict=False))
    if loosely:
        return all(bool(torch.isfinite(a).all()) == bool(torch.isfinite(b).all()) for a, b in pairs)
    return all(
        a.shape == b.shape
        and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
        and torch.equal(torch.isfinite(a), torch.isfinite(b))
        for a, b in pairs
    )


def _in_words(error: BaseException) -> str:
    return traceback.format_exception_only(type(error), error)[-1].strip()[:500]


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raises in this thread if what is done inside takes too long."""
    thread = threading.get_ident()
    done = threading.Event()

    def wait() -> None:
        if not done.wait(None if math.isinf(seconds) else seconds):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread), ctypes.py_object(TooLong)
            )

    watchdog = threading.Thread(target=wait, name="nanguard-limits", daemon=True)
    watchdog.start()
    try:
        yield
    finally:
        done.set()
        watchdog.join()
