"""Carries the state before a bad step to a copy of a rank that replays it.

A copy of a rank is cut off from the others: the steps it makes by itself are not those of the run.
So it makes none. It goes through the data up to the step in question, and takes over there what the
run had come to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from nanguard.guard.optimizers import parameters_of

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from nanguard.launch.watch import Watch

# What is written at most; a copy of more would take longer than it is worth.
_MOST = 2 * 2**30


def save(watch: Watch, path: Path) -> bool:
    """Writes parameters, buffers and optimizer state; returns whether that could be done."""
    tensors = _tensors(watch)
    if sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) > _MOST:
        return False
    state = {"tensors": tensors, "optimizers": [o.state_dict() for o in watch.optimizers()]}
    try:
        torch.save(state, path)
    except (OSError, RuntimeError):
        return False
    return True


def load(watch: Watch, path: str) -> None:
    """Puts the state that was written into the models and optimizers of this process.

    Raises:
        RuntimeError: It belongs to other models.
        OSError: It cannot be read.
    """
    # Written by this run a moment ago, into a folder of its own.
    state: dict[str, Any] = torch.load(path, weights_only=True)  # noqa: TID251
    own = _tensors(watch)
    if own.keys() != state["tensors"].keys():
        raise RuntimeError("the models of the run have changed since then")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(state["tensors"][name])
    for optimizer, saved in zip(watch.optimizers(), state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)


def _tensors(watch: Watch) -> dict[str, Tensor]:
    trained = {
        f"{index}.{place}": parameter.detach()
        for index, optimizer in enumerate(watch.optimizers())
        for place, parameter in enumerate(parameters_of([optimizer]))
    }
    # A wrapper that was put around a model in the meantime gives its buffers longer names.
    named = watch.buffers().items()
    return trained | {name.removeprefix("module."): buffer.detach() for name, buffer in named}
