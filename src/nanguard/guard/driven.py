"""Guards the steps of a framework that owns the loop: it draws, calls backward and steps itself.

The framework says where a batch begins, which loss it goes back from, when its gradients are
complete, and when the batch is over. The host reads before each step, so that nothing has to be
given out again: a bad step is not made, and everything it touched goes back to before its first
batch.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import LBFGS

from nanguard.errors import UsageError
from nanguard.guard.batches import Kept
from nanguard.guard.guard import Guard
from nanguard.guard.optimizers import scaled_lr
from nanguard.guard.parts import check_loss, is_replaying
from nanguard.numerics import all_finite
from nanguard.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from torch import Tensor
    from torch.optim import Optimizer

    from nanguard.guard.flights import Flight
    from nanguard.guard.parts import Models, Optimizers


class Driven:
    """A guard that is notified of what happens instead of making it happen.

    For each batch: ``begin_batch``, then ``saw_loss`` before each backward pass, ``judge`` when
    the gradients of a step are complete and not clipped yet, and ``end_batch`` after the
    schedulers were stepped. The optimizers' ``step`` is replaced until ``close``: it does nothing
    for a step that was found to be bad.

    Attributes:
        guard: The guard.
        bad: Whether the last step was bad, until its batch is over.
        lost: How many steps have no finite loss, as the mean over the ranks.

    Args:
        model: The trained module, or several.
        optimizer: The optimizer, or several.
        steps: What the framework calls ``step`` on, for each optimizer; the optimizer itself
            unless it is wrapped.
        settings: As for a guard. The host is never late.
        options: What else a guard is given.
    """

    def __init__(
        self,
        model: Models,
        optimizer: Optimizers,
        *,
        steps: list[Any] | None = None,
        settings: Settings | None = None,
        **options: Any,
    ) -> None:
        settings = replace(_checked(settings), lag=0)
        self.guard = Guard(model, optimizer, settings=settings, **options)
        self._flights = self.guard._flights
        self._parts = self.guard._parts
        self._stepper = self.guard._stepper
        self._undo: list[tuple[Any, Any]] = []
        self._judged: Flight | None = None
        self._losses: list[Tensor] = []
        self.bad = False
        self.lost = 0.0
        self._batches = 0
        _refuse_searching(self._parts.optimizers)
        # What is begun before a framework's first batch is not a step.
        self._flights.driven, self._flights.open = True, None
        for lane, own in enumerate(self._parts.optimizers):
            self._replace_step((steps or self._parts.optimizers)[lane], own)

    @property
    def rank(self) -> int:
        """This rank."""
        return self._parts.ranks.rank

    def begin_batch(self, batch: Any) -> None:
        """Notes that a batch was drawn and is about to be used."""
        flights = self._flights
        if is_replaying(self._parts.recorder):
            return
        self.end_batch()
        if flights.open is None:
            flights.between()
            flights.open = flights.new()
        flights.open.batches.append((self._batches, Kept(batch)))
        flights.open.seen_backwards = flights.open.backwards
        self._batches += 1

    def saw_loss(self, loss: Tensor, *, scaled: bool = False) -> None:
        """Takes in a loss, before the backward pass from it.

        Args:
            loss: The loss, as backward will be called on it.
            scaled: Whether a GradScaler has multiplied it already.
        """
        if is_replaying(self._parts.recorder):
            return
        self._end_void(in_batch=True)
        check_loss(loss, self._parts.devices, "the loss of the training step")
        flight = self._flights.begin()
        value = self._parts.scaling.unscaled(loss.detach()) if scaled else loss.detach()
        flight.sum(self._parts.gate, "loss", value)
        flight.backwards += 1
        self._losses.append(value)
        seed = self._stepper.seed(flight, loss)
        if seed is not None:
            loss.register_hook(lambda gradient: gradient * seed)

    def judge(self, optimizer: Optimizer | None = None) -> bool:
        """Judges the step whose gradients are complete; returns whether it may be made.

        Args:
            optimizer: Whose step it is; that of all of them by default.

        Raises:
            NonFiniteError: The guard stops the run.
        """
        recorder = self._parts.recorder
        if recorder is not None and recorder.replaying:
            recorder.judge_again(self.guard._choose(optimizer)[1])
        flight = self._flights.open
        if self.bad or flight is None or not flight.backwards:
            return not self.bad
        if self._judged is flight:
            return True
        losses, self._losses = self._losses, []
        lane, optimizers = self.guard._choose(optimizer)
        if self._stepper.judge(flight, lane, optimizers):
            self._judged = flight
            return True
        self.bad = True
        shares = self._parts.ranks.gather(sum(not all_finite([x]) for x in losses) / len(losses))
        self.lost += sum(shares) / len(shares)
        try:
            self._stepper.give_up(flight, optimizers)
        except BaseException:  # Ctrl-C, too, and it goes on
            self.close()
            raise
        self._parts.scaling.overflow(optimizers)
        return False

    def end_batch(self) -> None:
        """Notes that a batch is over, and that the schedulers were stepped."""
        if is_replaying(self._parts.recorder):
            return
        if self._judged is not None:
            # A GradScaler has found an overflow, and did not call the optimizer.
            flight, self._judged = self._judged, None
            self._flights.launch(flight, keep=0)
        if self._flights.open is None or not self._flights.open.begun:
            self._end_void()
            self._flights.take_snapshot()

    def state_dict(self) -> dict[str, Any]:
        """Returns the guard's state with the places of all ranks, which have to call it together.

        For a framework that saves what the first rank returns, and no random streams of its own.
        """
        state = self.guard.state_dict()
        return {**state, "ranks": self._parts.ranks.gather(state["moment"])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from what ``state_dict`` returned."""
        self.guard.load_state_dict(state)
        # Where in the data the run goes on, the framework knows by itself.
        self._flights.resume, self._flights.open = None, None

    def end_epoch(self) -> None:
        """Counts a pass over the data."""
        self._flights.epoch += 1

    def close(self) -> None:
        """Ends the guard: nothing of it is left on any optimizer."""
        for owner, before in reversed(self._undo):
            if before is None:
                vars(owner).pop("step", None)
            else:
                owner.step = before
        self._undo.clear()
        self._end_void()
        self.guard.close()

    def __enter__(self) -> Driven:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()

    def _replace_step(self, owner: Any, optimizer: Optimizer) -> None:
        original = owner.step
        self._undo.append((owner, vars(owner).get("step")))

        @functools.wraps(original)
        def step(closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
            result = None
            if closure is not None:
                with torch.enable_grad():
                    result = closure()
                # It was evaluated; the optimizer only wants to hand on what came of it.
                args = (lambda: result, *args)
            return self._step(optimizer, lambda: original(*args, **kwargs), result)

        owner.step = step

    def _step(self, optimizer: Optimizer, call: Callable[[], Any], result: Any) -> Any:
        if not self.judge(optimizer):
            if hasattr(vars(optimizer).get("step", optimizer.step), "_wrapped_by_lr_sched"):
                # A scheduler warns about optimizers that have never been called.
                optimizer._opt_called = True  # type: ignore[attr-defined]
            return result
        flight, self._judged = self._judged, None
        if flight is None:
            return call()  # there was no backward pass, so there is nothing to judge
        made: list[Any] = []

        def make() -> None:
            with scaled_lr([optimizer], flight.lr_factor):
                made.append(call())

        _, optimizers = self.guard._choose(optimizer)
        self._stepper.take(flight, optimizers, make)
        return made[0] if made else result

    def _end_void(self, *, in_batch: bool = False) -> None:
        """Ends what comes after a bad step.

        Buffers and random streams went back when it was judged. What the framework did since is
        to step its schedules, and its scaler, or to begin with another step for the same batch.
        """
        if not self.bad:
            return
        self.bad = False
        self._parts.scaling.forget()
        void, self._flights.void = self._flights.void, None
        if void is not None:
            self._parts.unchanged.restore_schedules(void, scale=not in_batch)
        if not in_batch:
            for optimizer in self._parts.optimizers:
                optimizer.zero_grad(set_to_none=True)


def _checked(settings: Settings | None) -> Settings:
    if settings is not None and not isinstance(settings, Settings):
        raise UsageError(
            f"settings is of type {type(settings).__name__}, not nanguard.Settings.",
            where="the guard of a framework's loop",
            do="Give Settings(...), or leave it out for the defaults.",
        )
    return settings or Settings()


def _refuse_searching(optimizers: list[Optimizer]) -> None:
    """Refuses optimizers that move the parameters before their step can be judged."""
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS):
            raise UsageError(
                "LBFGS evaluates the loss several times a step and moves the parameters between.",
                where="the guard of a framework's loop",
                do="Use guard.step(closure=...) in a loop of your own, or another optimizer.",
            )
