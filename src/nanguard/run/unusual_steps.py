"""Steps of optimizers that evaluate the loss themselves, and steps that a script makes by hand."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from nanguard.guard.optimizers import gradients_of
from nanguard.guard.symptom import Symptom
from nanguard.numerics import all_finite
from nanguard.replay.copies import LastGood
from nanguard.replay.tracer.sites import users_frame
from nanguard.replay.watch import leaves_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.optim import Optimizer

    from nanguard.replay.start import Start
    from nanguard.run.live import Live


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
    if live.ordinal == 0:
        live.writer.say(
            "no torch optimizer was made: the update is the script's own, so the gradients of "
            "a bad step are set to 0 instead of holding it back"
        )
    symptom = live.bad_loss() or live.bad_manual_gradient()
    if symptom is None:
        live.track_step()
    else:
        leaves = [leaf.grad for leaf in leaves_of(live.roots) if leaf.grad is not None]
        _meet_by_hand(live, symptom, leaves)
    live.end_manual_step()


def grad_by_hand(live: Live, found: Any) -> None:
    """Judges gradients that the script has asked for, and will apply by itself."""
    live.writer.stepped()
    given = [gradient for gradient in found if gradient is not None]
    symptom = live.bad_loss()
    if symptom is None and not all_finite(given):
        symptom = Symptom("gradient", "nan", live.loss_value())
    if symptom is not None:
        _meet_by_hand(live, symptom, given)
    live.end_manual_step()


def _meet_by_hand(live: Live, symptom: Symptom, gradients: list[Tensor]) -> None:
    """Deals with a bad step that cannot be held back: a gradient of 0 moves nothing."""
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
