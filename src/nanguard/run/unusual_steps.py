"""Unusual steps: of LBFGS, by hand, with ``torch.func``, in CUDA graphs, left out by a scaler."""

from __future__ import annotations

import math
import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from nanguard.guard.optimizers import gradients_of
from nanguard.guard.policy import Action, Decision
from nanguard.guard.verdicts import Symptom
from nanguard.numerics import all_finite
from nanguard.replay.copies import LastGood
from nanguard.replay.task import Task
from nanguard.replay.tracer.sites import users_frame

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import CodeType, FrameType

    from torch import Tensor
    from torch.optim import Optimizer

    from nanguard.replay.patches import FuncGradients
    from nanguard.replay.start import Start
    from nanguard.run.live import Live

_NOT_PROTECTED = (
    "the script was given the gradients as they are, as it is not known which of the results they "
    "are: its weights are not protected"
)
_LOST = (
    "what the script trains is not finite any more: it computes its update by itself, and nothing "
    "can be put back"
)


def step_with_closure(
    live: Live, optimizer: Optimizer, call: Callable[..., Any], closure: Callable[[], Any]
) -> Any:
    """Makes a step only if what the closure leaves behind is finite.

    Args:
        live: The guard.
        optimizer: Whose step it is.
        call: Makes the step; with a closure other than the script's own, if it is given one.
        closure: The script's own.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        return _search(live, optimizer, call)

    def judged() -> Any:
        loss = closure()
        symptom = live.together.agree(*live.verdict(optimizer), live.ordinal)
        if symptom is not None:
            raise _BadStepError(symptom, loss)
        return loss

    # Other optimizers evaluate the closure once, before they change anything.
    try:
        with live.cut_rate(optimizer):
            result = call(judged)
    except _BadStepError as bad:
        live.bad_steps.meet(bad.symptom, optimizer)
        return bad.loss
    live.look_after(optimizer)
    return result


def _search(live: Live, optimizer: Optimizer, call: Callable[..., Any]) -> Any:
    """Lets an optimizer move between evaluations; puts back all of it if that goes wrong."""
    before = LastGood(live, wanted=True)
    before.take()
    result = call()
    symptom = live.bad_end_loss() or live.bad_state(optimizer)
    if symptom is not None:
        before.restore()
        live.bad_steps.meet(symptom, optimizer)
    else:
        live.good(optimizer)
    return result


class _BadStepError(Exception):
    """Leaves an optimizer's step before it has changed anything."""

    def __init__(self, symptom: Symptom, loss: Any) -> None:
        super().__init__()
        self.symptom = symptom
        self.loss = loss


def step_by_hand(live: Live) -> None:
    """Judges the gradients of a script that has no optimizer; nothing holds back what it does."""
    symptom = live.bad_loss() or live.bad_manual_gradient()
    if symptom is None:
        live.track_step()
    else:
        leaves = [leaf.grad for leaf in _leaves_of(live.roots) if leaf.grad is not None]
        _meet_by_hand(live, symptom, leaves)
    live.end_manual_step()


def grad_by_hand(live: Live, found: Any) -> None:
    """Judges gradients that the script has asked for, and will apply by itself."""
    if live.ordinal == 0:
        live.writer.stepped()
    given = [gradient for gradient in found if gradient is not None]
    symptom = live.bad_loss()
    if symptom is None and not all_finite(given):
        symptom = Symptom("gradient", "nan", live.loss_value())
    if symptom is not None:
        _meet_by_hand(live, symptom, given)
    live.end_manual_step()


class FuncSteps:
    """Steps that a script makes with gradients of ``torch.func``, which only it can apply."""

    def __init__(self, live: Live) -> None:
        self._live = live
        # The code that has computed others in this step, which do not move anything.
        self._others: list[CodeType] = []
        # Whether the gradients that are computed at a place move what they are computed for.
        self._trains: dict[tuple[CodeType, int], bool] = {}
        self._is_lost = False

    def judged(self, found: FuncGradients) -> Any:
        """Returns what the script is given: gradients of 0, if they are bad and it trains."""
        live, gradients = self._live, found.gradients
        if not gradients or any(gradient.requires_grad for gradient in gradients):
            return found.result  # a part of a loss, such as that of a physical law
        frame = users_frame(sys._getframe(1))
        if frame is None:
            return found.result
        if not self._moves(found, frame):
            self._others.append(frame.f_code)
            return found.result
        if live.ordinal == 0:
            live.writer.stepped()
        live.losses = [] if found.mean is None else [found.mean]
        given, symptom = found.result, live.bad_loss()
        if symptom is None and not all_finite(gradients):
            has_nan = any(bool((gradient != gradient).any()) for gradient in gradients)
            symptom = Symptom("gradient", "nan" if has_nan else "inf", live.loss_value())
        if symptom is None:
            live.track_step()
        elif not all_finite(tree_leaves(found.of)):
            self._meet_lost()
        else:
            given = self._meet(found, symptom, frame)
        self._others.clear()
        live.end_manual_step()
        return given

    def _meet(self, found: FuncGradients, symptom: Symptom, frame: FrameType) -> Any:
        """Deals with a bad step; returns what the script is given."""
        live = self._live
        start = live.starts.after_the_fact(frame)
        if start is not None:
            loss = found.loss
            start.losses = found.gradients if loss is None else [loss]
            start.func_calls = self._others.count(start.region.code)
        starts = [] if start is None else [start]
        if found.alone is None:
            live.bad_steps.note(symptom, None, Decision(Action.NOTED, _NOT_PROTECTED), starts)
            return found.result
        live.bad_steps.meet(symptom, None, starts=starts)
        return found.zeroed()

    def _meet_lost(self) -> None:
        """Says, once, that what is trained is bad, and that nobody can put it back."""
        if not self._is_lost:
            self._is_lost = True
            names = ["of the script's own"]
            symptom = Symptom("parameter", "nan", self._live.loss_value(), names=names)
            self._live.bad_steps.note(symptom, None, Decision(Action.NOTED, _LOST), [])

    def _moves(self, found: FuncGradients, frame: FrameType) -> bool:
        """Returns whether gradients move what they were computed for.

        Those of several tensors do. A single tensor may be a point at which somebody looks at the
        slope, unless a loop makes a new one of it in each turn.
        """
        place = (frame.f_code, frame.f_lasti)
        if place not in self._trains:
            several = any(isinstance(given, (dict, list, tuple)) for given in found.of)
            self._trains[place] = several or self._is_made_anew(found.of, frame)
        return self._trains[place]

    def _is_made_anew(self, given: Sequence[Any], frame: FrameType | None) -> bool:
        """Returns whether code that is running makes a new value for the name of a tensor."""
        own = {id(one) for one in given if isinstance(one, torch.Tensor)}
        while frame is not None:
            start = self._live.starts.after_the_fact(frame)
            piece = None if start is None else start.region.whole()
            names = [] if start is None else [n for n, v in start.names.items() if id(v) in own]
            if piece is not None and any(n in piece.live and n in piece.stores for n in names):
                return True
            frame = users_frame(frame.f_back)
        return False


class GraphSteps:
    """Steps in a CUDA graph, which the device makes without telling anyone."""

    def __init__(self, live: Live, every: int) -> None:
        """Prepares.

        Args:
            live: The guard.
            every: Replays of a graph between two looks at the parameters.
        """
        self._live = live
        self._every = every
        self._replays = 0
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def captured(self, optimizer: Optimizer) -> None:
        """Says what can be done for steps that a graph takes up."""
        writer = self._live.writer
        if not self._optimizers:
            writer.stepped()
            writer.say(
                "the script makes steps in a CUDA graph (torch.cuda.graph), which cannot be held "
                f"back: the parameters are looked at every {self._every} replays, and at the end"
            )
        self._optimizers.add(optimizer)

    def replayed(self) -> None:
        """Looks at what graphs have made of the parameters, now and then."""
        if not self._optimizers:
            return
        self._replays += 1
        if self._replays % self._every == 0:
            self._live.own(self.look)

    def look(self) -> None:
        """Looks at what graphs have made of the parameters."""
        for optimizer in list(self._optimizers):
            symptom = self._live.bad_state(optimizer)
            if symptom is not None:
                self._optimizers.discard(optimizer)  # once is enough: they stay bad
                self._live.bad_steps.meet(symptom, optimizer, step=self._replays)


def _leaves_of(roots: list[Tensor]) -> list[Tensor]:
    """Returns the tensors that a backward pass has left gradients in."""
    todo: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen, found = set(todo), []
    while todo:
        node = todo.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        for other, _ in node.next_functions:
            if other is not None and other not in seen:
                seen.add(other)
                todo.append(other)
    return found


def _meet_by_hand(live: Live, symptom: Symptom, gradients: list[Tensor]) -> None:
    """Deals with a bad step that cannot be held back: a gradient of 0 moves nothing."""
    if not live.bad_steps.ordinals:
        live.writer.say(
            "no torch optimizer was made: the update is the script's own, so the gradients of "
            "a bad step are set to 0 instead of holding it back"
        )
    for gradient in gradients:
        gradient.detach().zero_()
    live.bad_steps.meet(symptom, None)


def starts_without_backward(live: Live, optimizer: Optimizer) -> list[Start]:
    """Returns a start of the code around a step, in a script that never calls backward.

    Its gradients take the place of losses: a replay has to come to the same ones.
    """
    if live.backwards or not live.starts.is_on:
        return []
    start = live.starts.after_the_fact(users_frame(sys._getframe(1)))
    if start is None:
        return []
    start.losses = gradients_of(optimizer)
    return [start]


class Overflows:
    """Tells steps that a GradScaler leaves out for its scale from those whose gradient is bad.

    A scaler cannot: whatever is not finite makes it halve its scale. If a scale has let steps pass,
    the next one may overflow all the same, as its gradient is larger. So such a step is replayed
    without narrow types, in which no scale is too large. An optimizer that is fused leaves its step
    out on the device, where nobody hears of it.
    """

    def __init__(self, live: Live) -> None:
        self._live = live
        # Steps made since the last overflow, and overflows at a scale that had let steps pass.
        self._made = 0
        self._doubtful = 0

    def note(self, scaler: Any, optimizer: Optimizer, made: bool) -> None:  # noqa: FBT001
        """Notes a step whose loss is good; reports it if its gradient is bad at any scale.

        Args:
            scaler: The scaler.
            optimizer: Whose step it is.
            made: Whether it was made.
        """
        if made:
            self._made += 1
            return
        passed, self._made = self._made, 0
        # After so many good steps a scale grows, and then it may be too large.
        if not 0 < passed < scaler.get_growth_interval() or not self._live.options.trace:
            return
        self._doubtful += 1
        # Half of those that are the scale's fault are looked at, then a quarter, and so on.
        if self._doubtful & (self._doubtful - 1) == 0:
            self._look(scaler, optimizer)

    def _look(self, scaler: Any, optimizer: Optimizer) -> None:
        live = self._live
        starts, symptom = list(live.starts.ended), live.bad_gradient(optimizer)
        if symptom is None or not starts or live.together.active:
            return
        decision = Decision(Action.SKIP, "its GradScaler leaves it out, and would at any scale")
        bad = live.bad_steps.facts(symptom, optimizer, decision)
        replayer = live.bad_steps.replayer(bad, starts)
        same = replayer.run(Task(target=live.ordinal), math.inf)
        wide = Task(target=live.ordinal, precision="float32")
        if same is None or same.symptom is None or same.symptom.where != "gradient":
            return
        outcome = replayer.run(wide, math.inf)
        if outcome is None or outcome.error is not None or outcome.symptom is None:
            return
        self._doubtful = 0
        symptom.scale = scaler.get_scale()
        live.bad_steps.note(symptom, optimizer, decision, starts)
