"""Dispatch modes beside ours: what is on, taking one off, and working behind all of them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.utils._python_dispatch import TorchDispatchMode

_count: Callable[[], int] = torch._C._len_torch_dispatch_stack


def is_on(mode: TorchDispatchMode) -> bool:
    """Returns whether a mode sees the operations of this thread."""
    return any(other is mode for other in _get_current_dispatch_mode_stack())


def take_off(mode: TorchDispatchMode) -> None:
    """Ends a mode of this thread, and none of those that began later."""
    above = []
    while (other := _pop_mode()) is not mode:
        above.append(other)
    for other in reversed(above):
        _push_mode(other)


def unseen() -> contextlib.AbstractContextManager[Any]:
    """Returns a block whose operations no mode of the script's sees."""
    if _count():
        return _behind_modes()
    block: contextlib.AbstractContextManager[Any] = torch._C.DisableTorchFunction()
    return block


@contextlib.contextmanager
def _behind_modes() -> Iterator[None]:
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield
