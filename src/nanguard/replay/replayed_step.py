"""A step that is done again in the process that trains: what is noted of it, and where it ends."""

from __future__ import annotations

import contextlib
import math
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import _disable_current_modes

from nanguard.guard.optimizers import as_at_first, gradients_of
from nanguard.guard.verdicts import Symptom
from nanguard.numerics import all_finite
from nanguard.replay.handed_on import numbers_in
from nanguard.replay.python_state import RefusedError
from nanguard.replay.region import AGAIN, NoRegionError
from nanguard.replay.replay import Replay
from nanguard.replay.tracer.sites import here
from nanguard.replay.watch import single_number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from torch import Tensor
    from torch.optim import Optimizer

    from nanguard.replay.patches import FuncGradients
    from nanguard.replay.start import Start
    from nanguard.replay.task import ReplayOutcome, Task
    from nanguard.replay.watch import Watch

    Apply = Callable[[Watch, Optimizer, Callable[..., Any]], dict[str, float]]


class Reached(BaseException):
    """Leaves a replay where its step would have been made."""


class ReplayedStep(Replay):
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
        self._func_calls = 0
        self._func_parameters: dict[str, Tensor] = {}
        self.outcome: ReplayOutcome | None = None
        self.again: list[Any] = []
        self._scaler_of_run = run._scaler
        self.clip_limit = run.clip_limit
        self.facts.curves, self.facts.loaded_bad = run.curves.all(), dict(run.loaded_bad)
        self.facts.losses = [x for x in run.recent_losses if math.isfinite(x)]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watches every operation, if that is the task."""
        with as_at_first(self._scaler_of_run):
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

    def next_batch(self, own: Any, draw: Callable[[Any], Any]) -> Any:
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

    def named_parameters(self) -> dict[str, Tensor]:
        """Returns the parameters of the models, and what ``torch.func`` is given as such."""
        return {**super().named_parameters(), **self._func_parameters}

    def func_grad(self, found: FuncGradients) -> Any:
        """Judges gradients of ``torch.func``, and what they are the gradients of."""
        if self.made_by or self.backwards or any(g.requires_grad for g in found.gradients):
            return found.result
        self._func_calls += 1
        if self._func_calls != self._start.func_calls + 1:
            return found.result
        if self.trace is not None:
            self.trace.end_backward()
        with _disable_current_modes():
            self.facts.backward_site = here()
            self._func_parameters = found.parameters
            self._look_around()
            loss = found.loss
            if loss is not None:
                self.losses = [loss]
                self._judge(self.bad_loss(), None)
            bad = [g for g in found.gradients if not all_finite([g])]
            if bad and not self.answered:
                self.handed = bad
                self._judge(Symptom("gradient", "nan", self.loss_value()), None)
            if not self.answered:
                self.answer(self._outcome(None))
            self.losses = self.losses or found.gradients
        self._leave()
        return found.result

    def read(self, tensor: Tensor, value: float) -> None:
        """Ends the replay of an evaluation at the number that was bad."""
        if not self._reads or self.answered:
            return
        self._reads = False  # what is read from now on is read by us
        with _disable_current_modes():
            self.losses = [tensor.detach()]
            self._judge(self.bad_loss(), self._optimizer())
        self._leave()

    def collective(self) -> None:
        """Refuses what would reach other ranks that do not replay this step."""
        if not self._together and dist.is_initialized() and dist.get_world_size() > 1:
            raise RefusedError("one rank alone cannot replay what it does together with others")

    def judged_step(self, optimizer: Optimizer, call: Callable[..., Any], closure: Any) -> Any:
        """Judges the step, and does not make it."""
        if callable(closure):
            with torch.enable_grad():
                closure()
        with _disable_current_modes():
            self.facts.step_site = here()
            loss, gradient = self.verdict(optimizer)
            self._judge(loss or gradient, optimizer, by_hand=self._scaler is not None)
            if not self.answered:
                self.answer(self._outcome(optimizer))
            # Where nothing goes back from a loss, the gradients tell whether it is the same step.
            self.losses = self.losses or gradients_of(optimizer)
        self._leave()

    def judge_update(self, optimizer: Optimizer, *, must_be: list[Tensor]) -> None:
        """Judges what an optimizer has made of good gradients, and ends the replay.

        Args:
            optimizer: The optimizer.
            must_be: The parameters of which one has to be bad; nothing for any.
        """
        with _disable_current_modes():
            self.facts.step_site = here()
            symptom = self.bad_state(optimizer)
            if not must_be or not all_finite(must_be):
                self._judge(symptom, optimizer)
            if not self.answered:
                self.answer(self._outcome(optimizer))
        self._leave()

    def judged_scaler_step(self, scaler: Any, optimizer: Any, call: Callable[[], Any]) -> Any:
        """Judges the loss; if that of the run was good, the gradients, otherwise the scaler's."""
        with _disable_current_modes():
            self._judge(self.bad_loss(), optimizer)
            if not self.answered and all_finite(self._start.losses):
                self._judge(self.bad_gradient(optimizer), optimizer)
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
        found = numbers_in(seen, self._start.objects)
        made = [number for place, number in found.items() if place in self._start.made]
        with _disable_current_modes():
            if not self.losses:
                self.losses = [n.detach() for n in made] if self._start.made else scalars_in(seen)
            self._judge(self.bad_loss(), self._optimizer())
        if made and not self.answered:
            # A turn of several: the backward pass that comes after the last one goes through it.
            losses, self.losses = self.losses, []
            with contextlib.suppress(Reached):
                torch.autograd.backward(made)
            self.losses = losses
        with _disable_current_modes():
            if not self.answered:
                self.answer(self._outcome(self._optimizer()))

    def answer(self, outcome: ReplayOutcome) -> None:
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


class MadeStep(ReplayedStep):
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
        if not self._exactly or same_losses(self._start.losses, self.losses):
            self.numbers = self._apply(self, optimizer, call)
            self.answered = True
        raise Reached


def scalars_in(names: dict[str, Any]) -> list[Tensor]:
    """Returns the single numbers among some names that a graph leads to, bad ones first.

    Methods keep theirs in attributes.
    """
    own = names.get("self")
    held = vars(own).values() if hasattr(own, "__dict__") else ()
    found = [
        value.detach()
        for value in (*names.values(), *held)
        if issubclass(type(value), torch.Tensor)
        and value.numel() == 1
        and value.is_floating_point()
    ]
    return sorted(found, key=lambda value: bool(torch.isfinite(value).all()))[:1]


def same_losses(left: list[Tensor], right: list[Tensor], *, loosely: bool = False) -> bool:
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


@contextlib.contextmanager
def compared(start: Start) -> Iterator[None]:
    """Stops a replay that comes to the model with other values than the run did.

    A whole region is begun with names of which some may be later ones.
    """
    done = False

    def before(_module: Any, _args: Any) -> None:
        nonlocal done
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_name != AGAIN:
            frame = frame.f_back
        if done or frame is None or not start.piece.first <= (frame.f_lineno or 0):
            return
        done = True
        with _disable_current_modes():
            for name, value in start.names.items():
                if name in frame.f_locals and not _alike(value, frame.f_locals[name]):
                    raise NoRegionError(f"{name} is another one than it was when the step was made")

    hook = register_module_forward_pre_hook(before)
    try:
        yield
    finally:
        hook.remove()


def _alike(value: Any, other: Any) -> bool:
    """Returns whether two values are the same, as far as they can be compared quickly."""
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        if value.shape != other.shape or value.dtype != other.dtype:
            return False
        return value is other or torch.equal(torch.nan_to_num(value), torch.nan_to_num(other))
    if type(value) in (int, float, str, bool):
        return bool(value == other or value != value)
    return True
