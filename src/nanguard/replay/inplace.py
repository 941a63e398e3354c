"""Replays a step in the process that trains, from what it began with.

The optimizer was held back, so parameters and optimizer state are those that the step began with.
What has to be done again is a piece of Python that is still there. It is called with the names and
random streams that were remembered, with something changed if that is to be tried, and it ends
where the step would have been made. Afterwards the run is as if nobody had looked.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils._python_dispatch import _disable_current_modes

from nanguard.guard.held import BufferPlaces, Held
from nanguard.guard.optimizers import hyperparameters, set_hyperparameters, state_tensors
from nanguard.numerics import without_graph
from nanguard.replay import changes
from nanguard.replay.bad_data import data_origin, made_anew
from nanguard.replay.copies import MOST_COPIED, StateCopy, Written, bytes_in, why_not_copied
from nanguard.replay.handed_on import likely_turns, noted, was_bad_before
from nanguard.replay.made_before import find_table
from nanguard.replay.python_state import Reachable, RefusedError, is_used_up, spare, spared_copy
from nanguard.replay.region import NoRegionError
from nanguard.replay.replayed_step import MadeStep, Reached, ReplayedStep, compared, same_losses
from nanguard.replay.sandbox import Outside, TimeLimit, TooLong, signals_wait
from nanguard.replay.task import ReplayOutcome, Task
from nanguard.replay.tracer.sites import is_part_of_script

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor
    from torch.optim import Optimizer

    from nanguard.replay.bad_data import Drawn
    from nanguard.replay.made_before import Table
    from nanguard.replay.patches import Patches
    from nanguard.replay.region import Piece
    from nanguard.replay.start import Start
    from nanguard.replay.starts import Starts
    from nanguard.replay.watch import Watch

    Apply = Callable[[Watch, Optimizer, Callable[..., Any]], dict[str, float]]
    Leaves = Literal["nothing", "parameters", "tensors"]

# Bytes of a tensor that a replay is given a copy of.
_COPIED = 64 << 20
# How many ways there are to begin from one start.
_WAYS = 3
# What needs the steps before this one, which are gone.
_HISTORY = ("clip", "fresh_grads")


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to begin a replay.

    Attributes:
        number: Its place among all of them.
        start: What was remembered.
        streams: The random streams to begin with.
        whole: Whether to begin with the whole region, although only a part of it was seen to begin.
    """

    number: int
    start: Start
    streams: dict[str, Any]
    whole: bool

    @property
    def objects(self) -> list[tuple[Any, dict[str, Any]]]:
        """The attributes of the script's own objects to begin with."""
        start = self.start
        earlier = self.whole or (self.streams is start.earlier is not start.streams)
        return start.earlier_objects if earlier else start.objects


class InPlace:
    """Replays one bad step, as often as there is something to try.

    Attributes:
        wants_history: Whether something was asked for that only a second run can show.
        differs: Whether every unchanged replay gave another loss than the run's.
    """

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
        longest: float = math.inf,
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
            longest: How many seconds one replay may take.
        """
        self._longest = longest
        self._run, self._patches, self._starts = run, patches, starts
        self._candidates = candidates
        self._step, self._ordinal = step, ordinal
        self._together, self._unfinished, self._reads = together, unfinished, reads
        self._chosen: Variant | None = None
        # Replays the turn before the last one that made what is bad, if it was one of those.
        self._turn: InPlace | None = None
        self._reachable: dict[int, Reachable] = {}
        # The batch, if it came in bad and can be made again.
        self._drawn: Drawn | None = None
        # The bad value that the step was given, if it was made before and can be made again.
        self._table: Table | None = None
        # Announces each replay to other ranks, where they have to take part in it.
        self.announce: Callable[[Task, int], None] | None = None
        self.wants_history = False
        self.differs = False

    def run(self, task: Task, seconds: float) -> ReplayOutcome | None:
        """Replays the step with the changes of a task."""
        if task.lr_factor != 1.0 or any(getattr(task, name) for name in _HISTORY):
            self.wants_history = True
            return ReplayOutcome(error="only a second run can go through the steps before this one")
        if self._together and task.precision is not None:
            return ReplayOutcome(error="a model that lies on several ranks is not made wider")
        if self._turn is not None:
            return self._turn.run(task, seconds)
        task = replace(task, target=self._run.ordinal, skipped=())
        seconds = min(seconds, self._longest)
        if self._chosen is None:
            return self._settle(task, seconds)
        if task.on_good:
            return self._replay_good(task, self._chosen, seconds)
        if task.further:
            return self._follow(task, self._chosen, seconds)
        return self._replay(task, self._chosen, seconds)[0]

    def _follow(self, task: Task, variant: Variant, seconds: float) -> ReplayOutcome:
        """Makes the step a few times with a change, and judges the one after; nothing of it stays.

        All of them are given the same batch, so that only the change makes a difference.
        """
        start, optimizers = variant.start, self._run.optimizers()
        moved = bytes_in([*self._run.named_parameters().values(), *state_tensors(optimizers)])
        if self._together or not start.stepped or moved > MOST_COPIED:
            return ReplayOutcome(error="the steps after it cannot be made here")
        held = Held(BufferPlaces(self._run.models()))
        held.mark()
        state = StateCopy(self._run.named_parameters().values(), optimizers)
        try:
            for _ in range(task.further):
                before = [p._version for p in self._run.named_parameters().values()]
                replay = MadeStep(task, self._run, start, _applied, exactly=False)
                with self._as_before(variant, leaves="parameters") as stack:
                    error = self._call(replay, task, variant, stack, seconds)
                after = [p._version for p in self._run.named_parameters().values()]
                if replay.numbers is None or before == after:
                    return ReplayOutcome(
                        error=error or "the step's code does not make the step here"
                    )
            return self._replay(replace(task, further=0), variant, seconds)[0]
        finally:
            state.put_back(unnoticed=True)
            held.restore(held.shape)

    def _replay_good(self, task: Task, bad: Variant, seconds: float) -> ReplayOutcome:
        """Replays a good step with a change, from what corresponds to the start of the bad one."""
        later = any(bad.start is start.later for start in self._candidates)
        known = [start.later if later else start for start in self._starts.good]
        place = (bad.start.region.code, bad.start.piece.first)
        alike = [s for s in known if s and (s.region.code, s.piece.first) == place]
        for variant in self._variants_of(alike):
            if variant.number % _WAYS == bad.number % _WAYS and not variant.start.inexact:
                return self._replay(task, variant, seconds)[0]
        return ReplayOutcome(error="no good step is remembered")

    def make(self, apply: Apply, *, exactly: bool) -> dict[str, float] | None:
        """Makes a step again, for good; returns its numbers, or None if that could not be done.

        Args:
            apply: Judges and makes the step, and returns its numbers.
            exactly: Whether its losses have to be those that it had.
        """
        made = None
        gradients = self._set_aside_gradients()
        for start in (start.later or start for start in self._candidates):
            if start.inexact:
                break
            task = Task(self._run.ordinal)
            replay = MadeStep(task, self._run, start, apply, exactly=exactly)
            variant = Variant(0, start, start.streams, whole=False)
            with self._as_before(variant, leaves="tensors") as stack:
                error = self._call(replay, task, variant, stack, math.inf)
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

    def _settle(self, task: Task, seconds: float) -> ReplayOutcome:
        """Finds the start from which the unchanged replay is exact; returns that replay."""
        errors: list[str] = []
        given: tuple[Variant, ReplayOutcome] | None = None
        for variant in self._variants():
            outcome, losses = self._replay(replace(task, trace=True), variant, seconds)
            if outcome.error is not None:
                errors.append(outcome.error)
                if outcome.error == TOO_LONG:
                    break  # it waits for something that will not come
                continue
            if not same_losses(variant.start.losses, losses, loosely=changes.is_compiled()):
                errors.append(_DIFFERS)
                continue
            if outcome.symptom is None:
                # A pass of the step that was good.
                errors.append("no pass of the step is bad by itself, only all of them together")
                continue
            if self._reads and _came_in(outcome):
                continue  # the number was made further out
            if was_bad_before(variant.start):
                given = given or (variant, outcome)
                continue
            self._chosen = variant
            return outcome
        outcome_of_turn = self._settle_on_turn(task, seconds)
        if outcome_of_turn is not None:
            return outcome_of_turn
        if given is not None:
            self._chosen, outcome = given
            return outcome
        self.differs = bool(errors) and all(error == _DIFFERS for error in errors)
        reason = errors[-1] if errors else "what the step began with was not recorded"
        return ReplayOutcome(error=reason, differs=self.differs)

    def _settle_on_turn(self, task: Task, seconds: float) -> ReplayOutcome | None:
        """Finds the turn of the loop, of those before the last one, that made what is bad."""
        until = time.monotonic() + seconds  # for all of them together
        # Where all ranks replay in lockstep, one of them cannot go its own way.
        for start in [] if self._together else likely_turns(self._candidates):
            if time.monotonic() > until:
                break
            turn = InPlace(
                self._run,
                self._patches,
                self._starts,
                [start],
                step=self._step,
                ordinal=self._ordinal,
                unfinished=True,
                longest=self._longest,
            )
            outcome = turn.run(task, seconds)
            if outcome is not None and outcome.symptom is not None and not _came_in(outcome):
                self._turn = turn
                return outcome
        return None

    def comes_from_a_model(self) -> bool:
        """Returns whether a bad number comes again, and was computed with or by a model."""
        outcome = self._settle(Task(self._run.ordinal), math.inf)
        if outcome.symptom is None or outcome.origin is None:
            return False
        sources = outcome.origin.sources.values()
        if outcome.origin.op == "parameter" or any("parameter" in kinds for kinds in sources):
            return True
        inside = (step.get("module") for step in outcome.facts.path)
        return any(module not in (None, "input", "loss") for module in inside)

    def is_exact(self) -> bool:
        """Returns whether a good step comes out bit for bit when it is replayed."""
        for variant in self._variants():
            outcome, losses = self._replay(Task(self._run.ordinal), variant, math.inf)
            if outcome.error is None and losses and same_losses(variant.start.losses, losses):
                return True
        return False

    def replay(self, task: Task, number: int) -> None:
        """Takes part in a replay of another rank's.

        Args:
            task: What to do.
            number: Which of the variants it begins from.
        """
        variants = list(self._variants())
        if number < len(variants):
            self._replay(task, variants[number], math.inf)

    def _variants(self) -> Iterator[Variant]:
        every = [one for start in self._candidates for one in (start, start.later)]
        return self._variants_of([one for one in every if one is not None])

    def _variants_of(self, starts: list[Start]) -> Iterator[Variant]:
        """Yields the ways to begin a replay, of which each start has the same number."""
        number = 0
        for start in starts:
            for kind, streams in (
                ("whole", start.earlier or start.streams),
                ("piece", start.streams),
                ("piece", start.earlier),
            ):
                known = streams is not None and (kind == "piece" or start.whole is not None)
                if kind == "whole" and (self._unfinished or _uses_up(start)):
                    known = False
                if known:
                    assert streams is not None  # noqa: S101 - just looked at
                    yield Variant(number, start, streams, whole=kind == "whole")
                number += 1

    def _replay(
        self, task: Task, variant: Variant, seconds: float
    ) -> tuple[ReplayOutcome, list[Tensor]]:
        if torch._C._current_autograd_node() is None:
            return self._replay_here(task, variant, seconds)
        # Inside of a hook, what is computed would be taken for a part of the backward pass.
        with ThreadPoolExecutor(1, thread_name_prefix="nanguard-replays") as pool:
            return pool.submit(self._replay_here, task, variant, seconds).result()

    def _replay_here(
        self, task: Task, variant: Variant, seconds: float
    ) -> tuple[ReplayOutcome, list[Tensor]]:
        start = variant.start
        why_not = why_not_copied(self._run.named_parameters().values())
        if why_not is not None:
            return ReplayOutcome(error=why_not), []
        if self.announce is not None:
            self.announce(task, variant.number)
        replay = ReplayedStep(task, self._run, start, together=self._together, reads=self._reads)
        replay.indices, replay.drawn = [], [(b, i) for _, b, i in self._starts.batches]
        replay.began_with = [*start.names.values(), *(start.whole or {}).values()]
        replay.streams = variant.streams
        versions = [(t, t._version) for t in start.names.values() if _has_version(t)]
        with self._as_before(variant) as stack:
            error = self._call(replay, task, variant, stack, seconds)
            moved = any(t._version != version for t, version in versions)
        outcome = replay.outcome
        if moved and variant.whole and not task.without:
            outcome = ReplayOutcome(error="the step changes in place what it was given")
        if outcome is None:
            outcome = ReplayOutcome(error=error or "the step's code ended before its backward pass")
        outcome.step, outcome.ordinal = self._step, self._ordinal
        if task.trace and outcome.origin is not None and not task.heal:
            drawn = data_origin(outcome, self._starts.batches, self._starts.streams)
            self._drawn = drawn or self._drawn
            # What the script did with its data before it came to this step was not seen.
            outcome.facts.unseen = not outcome.facts.came_in
            given = outcome.facts.unseen and outcome.origin.op in ("input", "buffer")
            # What an evaluation was given is looked for further out.
            if not self._reads and (given or outcome.origin.intended):
                self._look_for_table(outcome, replay, variant)
        return outcome, replay.losses

    def _look_for_table(
        self, outcome: ReplayOutcome, replay: ReplayedStep, variant: Variant
    ) -> None:
        """Finds out what made a value bad that the step was given, if that was made before it."""
        assert outcome.origin is not None  # noqa: S101 - the caller has looked
        assert replay.trace is not None  # noqa: S101
        with self._as_before(variant) as stack:
            try:
                stack.enter_context(TimeLimit(self._longest))
                since = [variant.streams, variant.start.step_end]
                self._table = find_table(
                    outcome.origin,
                    replay.trace,
                    self._starts.streams,
                    [moment for moment in since if moment],
                    self._starts.table,
                )
            except TooLong:
                return
        if self._table is not None:
            self._starts.table = self._table
            outcome.origin, outcome.facts.unseen = self._table.origin, False
            outcome.facts.suspects = []

    def _call(
        self,
        replay: ReplayedStep,
        task: Task,
        variant: Variant,
        stack: contextlib.ExitStack,
        seconds: float,
    ) -> str | None:
        """Runs the step's code; returns why it did not come to its end, if so."""
        stack.enter_context(self._patches.followed_by(replay))
        start = variant.start
        seen: dict[str, Any] = {}
        resume: Callable[[Any], None] = partial(noted, seen)
        try:
            piece, names = self._prepared(replay, task, variant, stack)
            stack.enter_context(start.ambient.entered(autocast=task.precision is None))
            stack.enter_context(TimeLimit(seconds))
            stack.enter_context(replay.watching())
            spared = partial(spare, given=bool(replay.again))
            if start.taking is not None:
                resume = start.taking.resumed(spared, seen.update)
            piece.call(start.module, names, start.cls, seen.update, resume)
        except Reached:
            return None
        except TooLong:
            return TOO_LONG
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the script raises
            if self._unfinished and not isinstance(error, (NoRegionError, RefusedError)):
                replay.left(seen)
            return in_words(error)
        if self._unfinished:
            replay.left(seen)
        else:
            replay.ended(complete=self._reads)
        return None

    def _prepared(
        self, replay: ReplayedStep, task: Task, variant: Variant, stack: contextlib.ExitStack
    ) -> tuple[Piece, dict[str, Any]]:
        """Returns the code of a step and what it is called with, after the changes of a task."""
        start = variant.start
        again = replay.again = [*(start.drawn if variant.whole else ()), *start.given]
        given = (start.whole or {}) if variant.whole else start.names
        names = {name: spare(value, given=bool(again)) for name, value in given.items()}
        if start.turns:
            # The graph of the turns before it is gone after the backward pass of the run.
            names = {name: without_graph(value) for name, value in names.items()}
        if variant.whole:
            # The region may change in place what it is given, and is replayed more than once.
            small = {n: v for n, v in names.items() if _is_small(v)}
            names.update({name: value.clone() for name, value in small.items()})
        piece = start.region.whole() if variant.whole else start.piece
        if task.source:
            text = task.source.get(piece.code.co_filename)
            if text is not None:
                piece = start.region.changed(piece, text)
            stack.enter_context(changes.swapped_code(task.source, own=start.region.code))
            if self._drawn is not None:
                made_anew(self._drawn, names, again)
            if self._table is not None:
                self._table.put_changed(task.source, stack)
        if task.precision is not None:
            stack.enter_context(changes.wider(getattr(torch, task.precision), self._run))
        if task.without:
            again[:] = [changes.without(batch, task.without) for batch in again]
            only = task.targets_only
            stack.enter_context(changes.replaced_samples(task.without, targets_only=only))
        elif variant.whole and not (task.source or task.precision):
            stack.enter_context(compared(start))
        return piece, names

    @contextlib.contextmanager
    def _as_before(
        self, variant: Variant, *, leaves: Leaves = "nothing"
    ) -> Iterator[contextlib.ExitStack]:
        """Makes the run what it was before the step, and afterwards what it is now.

        Args:
            variant: How the step begins.
            leaves: What stays as the step makes it: nothing, the parameters, or all tensors.
        """
        run, starts, start = self._run, self._starts, variant.start
        # Torch imports it for every dispatch mode, and it writes while it is imported.
        with contextlib.suppress(ImportError):
            importlib.import_module("torch._dynamo")
        reachable = self._reach(start)
        held = Held(BufferPlaces(run.models()))
        held.mark()
        written = Written([] if leaves != "nothing" else run.named_parameters().values())
        gradients = [] if leaves == "tensors" else self._set_aside_gradients()
        rates = hyperparameters(run.optimizers())
        reachable.keep([vars(owner) for owner, _ in variant.objects])
        now = starts.streams.capture()
        starts.paused = True
        try:
            with torch.no_grad():
                start.undo_changes()
            starts.streams.restore(variant.streams)
            given = bool(start.drawn or start.given)
            for owner, attributes in variant.objects:
                vars(owner).update({n: spared_copy(v, given=given) for n, v in attributes.items()})
            _share(start)
            with contextlib.ExitStack() as outer:
                for held_back in (signals_wait(), Outside(), changes.quiet(), changes.eagerly()):
                    outer.enter_context(held_back)
                if not self._together:
                    outer.enter_context(changes.alone())
                outer.enter_context(reachable.spared(given=given))
                with contextlib.ExitStack() as inner:
                    yield inner
        finally:
            with _disable_current_modes():
                for parameter, gradient in gradients:
                    parameter.grad = gradient
                if leaves != "tensors":
                    held.restore(held.shape)
                    written.put_back()
                set_hyperparameters(run.optimizers(), rates)
                reachable.put_back(tensors=leaves != "tensors")
            starts.streams.restore(now)
            starts.paused = False

    def _reach(self, start: Start) -> Reachable:
        known = self._reachable.get(id(start))
        if known is None:
            modules = [
                vars(module) for module in list(sys.modules.values()) if is_part_of_script(module)
            ]
            known = self._reachable[id(start)] = Reachable(
                [
                    *start.names.values(),
                    *(start.taking.names.values() if start.taking else ()),
                    *(owner for owner, _ in start.objects),
                    *self._run.optimizers(),
                ],
                modules,
            )
        return known


TOO_LONG = "the replay did not come to an end in its time"
_DIFFERS = "what was replayed is not what ran: its loss is another one"


def _uses_up(start: Start) -> bool:
    """Returns whether a whole region may take from an iterator what cannot be given out again."""
    reads = start.region.whole().reads
    names = {**start.module, **(start.whole or {})}
    return not start.drawn and any(is_used_up(names[name]) for name in reads if name in names)


def _has_version(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_inference()


def _is_small(value: Any) -> bool:
    plain = type(value) is torch.Tensor and not value.requires_grad and not value.is_inference()
    return plain and value.numel() * value.element_size() <= _COPIED


def _came_in(outcome: ReplayOutcome) -> bool:
    """Returns whether the code was given what is bad, and so has not made it."""
    origin = outcome.origin
    if origin is None or origin.op in ("input", "parameter", "buffer"):
        return True
    bad = [] if origin.detail is None else [s for s in origin.detail.inputs if s.nonfinite]
    return any("parameter" not in origin.sources.get(stats.name, ()) for stats in bad)


def _applied(_replay: Watch, _optimizer: Optimizer, call: Callable[..., Any]) -> dict[str, float]:
    """Makes a step, whatever its numbers are."""
    with torch.enable_grad():
        call()
    return {}


def in_words(error: BaseException) -> str:
    """Returns what a replay ended with."""
    return traceback.format_exception_only(type(error), error)[-1].strip()[:500]


def _share(start: Start) -> None:
    """Gives the variables that functions share with a step's code the values it began with."""
    if not start.shared:
        return
    inside = [const for const in start.region.code.co_consts if isinstance(const, CodeType)]
    for function in start.names.values():
        if isinstance(function, FunctionType) and function.__code__ in inside:
            free = function.__code__.co_freevars
            for name, cell in zip(free, function.__closure__ or (), strict=True):
                if name in start.shared:
                    cell.cell_contents = start.shared[name]
