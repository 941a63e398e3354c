"""Which code of the user's decides about a learning rate."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LRScheduler

from nanguard.replay.tracer.sites import Site, is_installed, is_users

if TYPE_CHECKING:
    from torch.optim import Optimizer


def schedule_of(optimizer: Optimizer) -> Site | None:
    """Returns where the function begins that a scheduler asks for the rate of an optimizer."""
    for scheduler in gc.get_objects():
        # Some objects raise when they are asked for their class.
        if not issubclass(type(scheduler), LRScheduler):
            continue
        if getattr(scheduler, "optimizer", None) is optimizer:
            for function in (*getattr(scheduler, "lr_lambdas", ()), type(scheduler).get_lr):
                site = _begins_at(function)
                if site is not None:
                    return site
    return None


def _begins_at(function: Any) -> Site | None:
    code = getattr(function, "__code__", None)
    if code is None or not is_users(code.co_filename) or is_installed(code.co_filename):
        return None
    return Site(code.co_filename, code.co_firstlineno, code.co_name)
