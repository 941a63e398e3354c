"""Several threads that train at the same moment: one of them is watched, and the others are named.

A watcher follows one step at a time. Threads that take turns are one run to it; but a loss that one
thread computes while another is within its step would be taken for a loss of that step. A thread
that comes while another is inside of a backward pass or an optimizer's step is left alone from then
on, as long as the other one lives.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class Nobody:
    """A watcher that lets everything happen and remembers nothing."""

    clip_limit: float | None = None

    def backward(self, call: Callable[[], Any], tensors: Any) -> Any:
        """Runs a backward pass."""
        return call()

    def grad(self, call: Callable[[], Any], outputs: Any) -> Any:
        """Computes gradients."""
        return call()

    def step(self, optimizer: Any, call: Callable[..., Any], closure: Any) -> Any:
        """Runs the step of an optimizer."""
        return call()

    def scaler_step(self, scaler: Any, optimizer: Any, call: Callable[[], Any]) -> Any:
        """Runs the step of a GradScaler."""
        return call()

    def next_batch(self, own: Any, draw: Callable[[], Any]) -> Any:
        """Returns the next batch."""
        return draw()

    def choose(self, own: Any, draw: Callable[[], Any]) -> Any:
        """Returns which samples are taken for a batch."""
        return draw()

    def read(self, tensor: Any, value: Any) -> None:
        """Hears of a number that the script has read."""

    def scaled(self, scaler: Any, loss: Any) -> None:
        """Hears of a loss that is about to be scaled."""

    def made(self, optimizer: Any) -> None:
        """Hears of a new optimizer."""

    def loaded(self, state: Any) -> None:
        """Hears of state that a module has taken over."""

    def clipped(self, parameters: Any, norm: Any) -> None:
        """Hears of gradients that were clipped."""

    def captured(self, optimizer: Any) -> None:
        """Hears of a step that a CUDA graph takes up."""

    def replayed_graph(self) -> None:
        """Hears that a CUDA graph was replayed."""

    def begin_pass(self, loader: Any) -> None:
        """Hears that the script is about to go over a loader."""


class Turns:
    """Knows which threads train, and which of them are left alone.

    Args:
        tell: Called once for each thread that is left alone, with its name and the name of the one
            that is watched; None to leave none alone.
    """

    def __init__(self, tell: Callable[[str, str], None] | None) -> None:
        self._tell = tell
        # The thread inside; a dictionary, as it is looked up and set in one.
        self._inside: dict[str, threading.Thread] = {}
        # Threads that are left alone, each with the one that is watched.
        self._alone: weakref.WeakKeyDictionary[threading.Thread, weakref.ref[threading.Thread]]
        self._alone = weakref.WeakKeyDictionary()

    def is_alone(self) -> bool:
        """Returns whether this thread is one that nobody watches."""
        if not self._alone:
            return False
        here = threading.current_thread()
        other = self._alone.get(here)
        watched = None if other is None else other()
        if other is not None and (watched is None or not watched.is_alive()):
            # The thread that was watched has ended: this one may take its place.
            del self._alone[here]
            return False
        return other is not None

    def enter(self) -> bool:
        """Notes that this thread begins a backward pass, or a step; returns whether it is new."""
        here = threading.current_thread()
        if self._tell is None or self._inside.get("now") is here or self.is_alone():
            return False
        other = self._inside.setdefault("now", here)
        if other is not here and other.is_alive():
            self._alone[here] = weakref.ref(other)
            self._tell(here.name, other.name)
            return False
        self._inside["now"] = here  # after a fork, the other one is not there any more
        return True

    def leave(self) -> None:
        """Notes that what was new is over."""
        self._inside.clear()
