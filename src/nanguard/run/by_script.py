"""What a script does about bad numbers by itself: it skips a step, ends itself, or only evaluates.

Nothing has to be protected then, but somebody wants to know why.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import math
import os
import sys
from typing import TYPE_CHECKING, Any

import torch

from nanguard.guard.policy import Action, Decision
from nanguard.guard.verdicts import Symptom
from nanguard.numerics import whole
from nanguard.replay.frames import stack_of
from nanguard.replay.tracer.sites import is_installed, is_users
from nanguard.replay.watch import is_good
from nanguard.run.incident_writer import BadStepFacts
from nanguard.run.known_faults import items_drawn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType, TracebackType

    from torch import Tensor

    from nanguard.replay.frames import Stack
    from nanguard.replay.start import Start
    from nanguard.run.live import Live

# Functions of the script, from the innermost one outwards, that an evaluation is looked for in.
_OUTWARDS = 4
# Bad numbers of evaluations that are looked into; a metric may be undefined each time.
_EVALUATIONS = 3


class ByScript:
    """Notes and reports the bad steps that the script has dealt with by itself.

    Attributes:
        count: How many steps there were that it did not make.
        unstepped: Gradients whose norm was computed, and no step made with them so far.
        known_at: The step after which a bad number was last reported.
        found: The last step that was left before its backward pass, and its bad number; None if
            that was reported.
        carried: The first such step since the last backward pass whose number the script may still
            go back from, in a later turn of its loop.
    """

    def __init__(self, live: Live) -> None:
        self._live = live
        self.count = 0
        self.unstepped: tuple[list[Start], Tensor] | None = None
        self.known_at = -1
        self.found: tuple[Start, float] | None = None
        self.carried: tuple[Start, float] | None = None
        # Whether the script is about to end itself, and whether it has read a bad number that a
        # graph leads to.
        self._ends = False
        self._has_read = False
        self._evaluations = 0

    def listen(self) -> None:
        """Hears from now on of what ends the script."""
        process, before = os.getpid(), sys.excepthook

        def hook(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
            before(kind, error, trace)
            if issubclass(kind, Exception) and os.getpid() == process:
                self._live.own(lambda: self._ended_by(trace))

        def heard(leave: Callable[..., Any], *, at_once: bool = False) -> Any:
            @functools.wraps(leave)
            def exit_(*args: Any) -> Any:
                if os.getpid() == process:
                    self._live.own(lambda: self._left_in(sys._getframe(3)))
                    if at_once and self.found is not None:
                        self._live.own(self._live.close)
                return leave(*args)

            return exit_

        sys.excepthook = hook
        sys.exit = heard(sys.exit)
        # Nothing else is called when a process ends like this.
        os._exit = heard(os._exit, at_once=True)
        for name in ("exit", "quit"):
            if name in vars(builtins):
                setattr(builtins, name, heard(vars(builtins)[name]))

    # Steps that are not made.

    def left(
        self, start: Start, names: Any, others: Sequence[Any] = (), *, carried: bool = False
    ) -> bool:
        """Notes a step that was left, if a number that it has made is bad.

        Args:
            start: What it began with.
            names: The names of its code, as they were when it was left.
            others: What else may be a number of the step.
            carried: Whether its graph goes on in the next turn.

        Returns:
            Whether a number is bad that the script has thrown away.
        """
        bad = self._bad_number(start, names, others)
        if carried:
            self.carried = self.carried or bad
            return False
        self.note_thrown_away()
        self.found = self.found or bad
        return self.found is not None

    def note_thrown_away(self) -> None:
        """Notes that the script never went back from a bad number that it had carried on."""
        self.found, self.carried = self.found or self.carried, None

    def _bad_number(
        self, start: Start, names: Any, others: Sequence[Any]
    ) -> tuple[Start, float] | None:
        made = {n: names[n] for n in start.piece.stores if n in names}
        # A number that was there before says nothing about this step.
        made = {n: value for n, value in made.items() if start.before.get(n) != id(value)}
        for value in (*made.values(), *others):
            graph = isinstance(value, torch.Tensor) and value.requires_grad and value.numel() == 1
            if graph and not is_good(value.detach()):
                return start, float(value.detach())
            if self._has_read and isinstance(value, float) and not math.isfinite(value):
                return start, value
        self._has_read = False
        return None

    def note_unfinished(self) -> None:
        """Notes, at the end of the script, the last step if it was left before its backward pass.

        ``raise SystemExit`` calls nothing that could be heard, and neither does a ``break``.
        """
        live = self._live
        trains, last = live.made_by or live.backwards, live.starts.current
        if self.found is not None and self.found[0] is last:
            self._ends = True  # its function has returned, and nothing came after it
        # Where no step is seen to begin, the last one may be one that was dealt with.
        known = last is None and self.known_at >= live.ordinal
        if not live.is_aside and trains and not known and self.found is None:
            self._ends = True
            self._note_left(live.starts.unfinished())

    def note_discarded(self) -> None:
        """Notes a pass of several whose loss was bad, and that the script has thrown away."""
        for start in self._live.starts.ended:
            bad = next((x for x in start.losses if not is_good(x)), None)
            if bad is not None and not start.reported:
                self.found = (start, float(bad))

    def meet(self) -> None:
        """Reports a step that the script has left before its backward pass, as it was bad."""
        if self.found is not None:
            ends = "the script ended itself" if self._ends else "the script skipped it by itself"
            self._report_left(ends)
        unstepped, self.unstepped = self.unstepped, None
        if unstepped is None:
            return
        starts, norm_there = unstepped
        norm = float(whole(norm_there).detach())  # the script has waited for it by itself
        if not math.isfinite(norm):
            loss = next((float(x) for start in starts for x in start.losses), None)
            symptom = Symptom("gradient", "nan" if math.isnan(norm) else "inf", loss, norm)
            self._report(symptom, starts, "the script did not make the step")

    def meet_unused_gradient(self) -> None:
        """Reports gradients that were bad when the script ended, with which no step was made."""
        live = self._live
        optimizer = next(iter(live.optimizers()), None)
        starts = [start for start in live.starts.ended if not start.reported]
        if live.is_aside or optimizer is None or not starts:
            return
        loss, gradient = live.verdict(optimizer)
        symptom = loss or gradient
        if symptom is not None:
            self._report(symptom, starts, "the script ended itself")

    def _ended_by(self, trace: TracebackType | None) -> None:
        """Reports the step that the script has ended at, if its numbers were bad."""
        frames: Stack = []
        while trace is not None:
            frames.insert(0, (trace.tb_frame, trace.tb_lineno))
            trace = trace.tb_next
        self._note_left(frames)
        if self.found is not None:
            self._report_left("the script ended itself")

    def _left_in(self, frame: FrameType | None) -> None:
        """Notes the step that the script is about to leave, if its numbers are bad."""
        self._ends = True
        start = self._live.starts.current
        if start is None or start.site is None or start.only_asked:
            self._note_left(stack_of(frame))

    def _note_left(self, frames: Stack) -> None:
        """Notes the step that some frames, the innermost first, have left, if a number is bad."""
        start = self._live.starts.current
        given = None
        for frame, line in frames:
            if start is None:
                handed = _bad_number_given(frame)
                given = given if handed is None else handed
                begun = self._begun_in(frame, line) if handed is None else None
            else:
                begun = start if frame.f_code is start.region.code else None
            if begun is None:
                continue
            names = frame.f_locals
            if self.left(begun, names, [given, *_graphs_of(names.get("self"))]):
                break

    def _begun_in(self, frame: FrameType, line: int) -> Start | None:
        """Returns a start of the code around a line, where steps are not seen to begin.

        Either none has come to its end so far, or no model is called in them.
        """
        name, starts = frame.f_code.co_filename, self._live.starts
        seen = self._live.backwards and starts.sees_models
        if seen or not is_users(name) or is_installed(name):
            return None
        start = starts.after_the_fact(frame, line=line)
        if start is not None:
            start.before = {}
        return start

    def _report_left(self, how: str) -> None:
        assert self.found is not None  # noqa: S101 - whoever calls this has looked
        (start, value), self.found = self.found, None
        if start.only_asked:
            start.losses, start.losses_at = [], []  # what gradients were asked of is not the loss
        symptom = Symptom("loss", "nan" if math.isnan(value) else "inf", value)
        self._report(symptom, [start], how, unfinished=True)

    def _report(
        self, symptom: Symptom, starts: list[Start], how: str, *, unfinished: bool = False
    ) -> None:
        live = self._live
        optimizer = next(iter(live.optimizers()), None)
        step = live.ordinal if optimizer is None else live.number_of(optimizer)
        self.count += 1
        reason = f"{how}; {self.count} of {self.count + live.ordinal} steps so far"
        decision = Decision(Action.SKIP, reason)
        bad = BadStepFacts(symptom, step, live.ordinal, decision, live.bad_steps.all_held_back())
        bad.known, bad.drawn = {"by_script": True}, items_drawn(live.starts, starts)
        for start in starts:
            start.reported = True
        if live.writer.report(bad):
            live.bad_steps.explain(bad, starts, unfinished=unfinished)

    # Evaluations.

    def read(self, tensor: Tensor, value: float, *, in_optimizer: bool) -> None:
        """Hears of a bad number that the script has read; in an evaluation that is news."""
        live = self._live
        self._has_read = self._has_read or tensor.requires_grad
        training = tensor.requires_grad or in_optimizer or self._is_in_step()
        if live.is_aside or training or not live.starts.is_on or self.known_at >= live.ordinal:
            return
        live.own(lambda: self._evaluated(tensor, value, sys._getframe(4)))

    def _is_in_step(self) -> bool:
        """Returns whether a graph may be alive that a replay would harm."""
        start = self._live.starts.current
        begun = start is not None and start.site is None and start.ambient.grad
        return begun or bool(self._live.starts.ended)

    def _evaluated(self, tensor: Tensor, value: float, frame: FrameType | None) -> None:
        """Reports a bad number of an evaluation."""
        live = self._live
        starts: list[Start] = []
        while frame is not None and len(starts) < 2 * _OUTWARDS:
            if is_users(frame.f_code.co_filename) and not is_installed(frame.f_code.co_filename):
                for statement in (True, False):
                    start = live.starts.after_the_fact(frame, statement=statement)
                    if start is not None:
                        start.losses, start.whole = [tensor.detach().clone()], None
                        starts.append(start)
            frame = frame.f_back
        symptom = Symptom("loss", "nan" if math.isnan(value) else "inf", value, evaluated=True)
        reason = "the script read it in an evaluation; no step was touched"
        self.known_at = live.ordinal
        bad = BadStepFacts(symptom, live.ordinal, live.ordinal, Decision(Action.NOTED, reason), ())
        # A metric may well be undefined; what a model has put out may not.
        self._evaluations += 1
        if self._evaluations > _EVALUATIONS or not live.writer.may_explain:
            return
        if live.bad_steps.replayer(
            bad, starts, reads=True
        ).comes_from_a_model() and live.writer.report(bad):
            live.bad_steps.explain(bad, starts, reads=True)


def _graphs_of(owner: Any) -> list[Tensor]:
    """Returns what an object keeps that was computed and can be differentiated: maybe a loss."""
    held = vars(owner).values() if hasattr(owner, "__dict__") else ()
    return [v for v in held if issubclass(type(v), torch.Tensor) and v.grad_fn is not None]


def _bad_number_given(frame: FrameType) -> Any:
    """Returns the bad number that a function was given; None if there is none.

    Such a function only looks at the number: whoever called it has made it.
    """
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    for name in code.co_varnames[:count]:
        value: Any = frame.f_locals.get(name)
        several = list(value.values()) if isinstance(value, dict) else value
        for each in several if isinstance(several, (list, tuple)) else [several]:
            single = isinstance(each, torch.Tensor) and each.numel() == 1
            if single and not is_good(each.detach()):
                return each
            if isinstance(each, float) and not math.isfinite(each):
                return each
    return None
