"""Which operation a node of autograd's graph was made for, so that backward has lines, too."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from nanguard.replay.tracer.op_records import Record

_next_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]


class Nodes:
    """The operations of a step by the numbers of their nodes, of which each thread has its own."""

    def __init__(self) -> None:
        self._made_for: dict[int, list[tuple[int, Record]]] = {}
        # The number that each thread gives to its next node.
        self._numbers: dict[int, int] = {}

    def forget(self) -> None:
        """Forgets the operations of a step that is over."""
        self._made_for = {}

    def is_new(self) -> bool:
        """Returns whether a node was made since the last operation of this thread."""
        return _next_number() != self._numbers.get(threading.get_ident())

    def add(self, record: Record, *, running: bool) -> None:
        """Notes an operation that is about to run.

        Args:
            record: The operation.
            running: Whether a node runs right now.
        """
        thread, number = threading.get_ident(), _next_number()
        known = self._numbers.get(thread)
        if number == known:
            return
        self._numbers[thread] = number
        if not running or known is not None:
            # The node of this operation exists already, and nothing has run since.
            self._made_for.setdefault(number - 1, []).append((thread, record))

    def operation_of(self, node: Any) -> Record | None:
        """Returns the operation that a node was made for."""
        found = self._made_for.get(node._sequence_nr())
        if found is None:
            return None
        return found[0][1] if len(found) == 1 else _likeliest(node, found)


def _likeliest(node: Any, found: list[tuple[int, Record]]) -> Record:
    """Returns one of several operations whose nodes have the same number in their threads."""
    fits = [_derivative_of(node, record.op) for _, record in found]
    found = [pair for pair, fit in zip(found, fits, strict=True) if fit == max(fits)]
    # What a thread computes again, it differentiates itself, with an engine that it calls. What
    # was first computed came before; its thread may have ended, and another have its name.
    thread, here = threading.get_ident(), _runs_engine(sys._getframe(1))
    likely = [pair for pair in found if (pair[0] == thread) is here] or found
    return likely[-1 if here else 0][1]


def _runs_engine(frame: FrameType | None) -> bool:
    """Returns whether the autograd engine was called by Python code of this thread."""
    while frame is not None and frame.f_code.co_name != "_engine_run_backward":
        frame = frame.f_back
    return frame is not None


def forward_name(node: Any) -> str:
    """Returns the forward operation a backward node seems to belong to."""
    name = node.name().split("::")[-1].rstrip("0123456789").removesuffix("Backward")
    return "aten." + "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")


def _derivative_of(node: Any, op: str) -> int:
    """Returns how well the name of a backward node fits to an operation: 0 is not at all."""
    node_name = forward_name(node).removeprefix("aten.").replace("_", "")
    name = op.removeprefix("aten.").replace("_", "")
    return 2 if name == node_name else int(name.startswith(node_name))
