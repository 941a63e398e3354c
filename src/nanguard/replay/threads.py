"""Several threads that train at the same moment: one of them is watched, and the others are named.

A watcher follows one step at a time. Threads that take turns are one run to it; but a loss that one
thread computes while another is within its step would be taken for a loss of that step. A thread
that comes while another is inside of a backward pass or an optimizer's step is left alone from then
on, as long as the other one lives. So is one that comes to its own step after another has made a
whole step, backward pass and all, since its backward pass: that step has used up its loss.
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

    def func_grad(self, found: Any) -> Any:
        """Returns what was computed."""
        return found.result

    def step(self, optimizer: Any, call: Callable[..., Any], closure: Any) -> Any:
        """Runs the step of an optimizer."""
        return call()

    def scaler_step(self, scaler: Any, optimizer: Any, call: Callable[[], Any]) -> Any:
        """Runs the step of a GradScaler."""
        return call()

    def next_batch(self, own: Any, draw: Callable[[Any], Any]) -> Any:
        """Returns the next batch."""
        return draw(own)

    def choose(self, own: Any, draw: Callable[[Any], Any]) -> Any:
        """Returns which samples are taken for a batch."""
        return draw(own)

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
        # The thread inside, by its number; a dictionary, as it is looked up and set in one.
        self._inside: dict[str, int] = {}
        # Threads that are left alone, each with the one that is watched.
        self._alone: weakref.WeakKeyDictionary[threading.Thread, weakref.ref[threading.Thread]]
        self._alone = weakref.WeakKeyDictionary()
        # Whether there ever was one: as long as there was none, nothing has to be looked up.
        self.left_any_alone = False
        # Threads between their backward pass and their step, each with how many whole steps had
        # been made by then; how many there are now, and which thread made the last. By number.
        self._begun: dict[int, int] = {}
        self._steps = 0
        self._last: int | None = None
        # The thread that has trained so far; None if none has, 0 if several have.
        self._sole: int | None = None

    def is_alone(self) -> bool:
        """Returns whether this thread is one that nobody watches."""
        if not self.left_any_alone:
            return False
        here = threading.current_thread()
        other = self._alone.get(here)
        watched = None if other is None else other()
        if other is not None and (watched is None or not watched.is_alive()):
            # The thread that was watched has ended: this one may take its place.
            del self._alone[here]
            return False
        return other is not None

    def enter(self, *, step: bool) -> bool:
        """Notes that this thread begins a backward pass, or a step; returns whether it is new.

        Args:
            step: Whether it is a step.
        """
        here = threading.get_ident()
        if self._tell is None or self._inside.get("now") == here:
            return False
        if self.left_any_alone and self.is_alone():
            return False
        inside = self._inside.setdefault("now", here)
        if inside == here == self._sole:
            # Every step of every run comes here, and hardly any run has a second thread.
            if step:
                self._begun.pop(here, None)
                self._steps += 1
            else:
                self._begun.setdefault(here, self._steps)
            return True
        if self._sole != here:
            self._sole, self._last = (here if self._sole is None else 0), self._sole or self._last
        if inside != here:
            other = _alive(inside)
            if other is not None:
                self._leave_alone(self._tell, other)
                return False
            self._inside["now"] = here  # after a fork, the other one is not there any more
        if not step:
            self._begun.setdefault(here, self._steps)
            return True
        before = self._between(here)
        if before is not None:
            self._inside.clear()
            self._leave_alone(self._tell, before)
        return before is None

    def _between(self, here: int) -> threading.Thread | None:
        """Notes a step; returns who has made a whole one since the backward pass of this thread."""
        begun = self._begun.pop(here, None)
        if begun is None:
            # Whoever went backward did it for this thread, as the workers of a pool do.
            self._begun.clear()
            return None
        last = self._last
        if last is not None and last != here:
            other = _alive(last) if self._steps > begun else None
            if other is not None:
                return other
            there = {thread.ident for thread in threading.enumerate()}
            self._begun = {ident: at for ident, at in self._begun.items() if ident in there}
        self._steps, self._last = self._steps + 1, here
        return None

    def _leave_alone(self, tell: Callable[[str, str], None], watched: threading.Thread) -> None:
        here = threading.current_thread()
        self._alone[here] = weakref.ref(watched)
        self._begun.pop(threading.get_ident(), None)
        self.left_any_alone = True
        tell(here.name, watched.name)

    def leave(self) -> None:
        """Notes that what was new is over."""
        self._inside.clear()


def _alive(ident: int) -> threading.Thread | None:
    """Returns the thread of a number, if it is there."""
    return next((thread for thread in threading.enumerate() if thread.ident == ident), None)
