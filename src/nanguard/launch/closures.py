"""Steps of optimizers that evaluate the loss themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from nanguard.launch.lastgood import LastGood

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer

    from nanguard.launch.live import Live
    from nanguard.tracer.symptom import Symptom


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
        live.meet(bad.symptom, optimizer)
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
        live.meet(symptom, optimizer)
    else:
        live.good(optimizer)
    return result


class _BadStepError(Exception):
    """Leaves an optimizer's step before it has changed anything."""

    def __init__(self, symptom: Symptom, loss: Any) -> None:
        super().__init__()
        self.symptom = symptom
        self.loss = loss
