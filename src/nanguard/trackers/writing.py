"""The threads in which trackers write, so that the training waits for none of them."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - its own end is registered before ours, so that it comes after
import os
import queue
import threading
import time
from functools import cache
from typing import TYPE_CHECKING, Any

from nanguard.masking import hidden_tree
from nanguard.trackers.tracker import Counting, Step, event_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nanguard.trackers.tracker import TrackedEvent, Tracker

_QUEUE = 100_000
_BATCH_SECONDS = 0.25
# How long the end of a run waits for trackers at most.
_END_SECONDS = 30.0


class Trackers:
    """Hands the lines of a run on to trackers; never waits, never fails.

    Nothing is started before the first line, so that a run of the user's own is found.

    Args:
        trackers: Who writes.
        on_failure: Told once for each tracker that fails, from its thread.
        at_exit: Called when the main thread has ended, before the libraries end their runs.
    """

    def __init__(
        self,
        trackers: Sequence[Tracker],
        *,
        on_failure: Callable[[str], None],
        at_exit: Callable[[], None] | None = None,
    ) -> None:
        self._writers = [Writer(tracker, on_failure) for tracker in trackers]
        self._before_exit = at_exit
        self._counting = Counting()
        self._pid = os.getpid()
        self._open = True
        _unfinished.add(self)
        _finish_at_exit()

    @property
    def lost(self) -> dict[str, int]:
        """How many lines could not be written, by tracker."""
        return {writer.tracker.name: writer.lost for writer in self._writers if writer.lost}

    def metric(self, line: dict[str, Any]) -> None:
        """Hands on a step."""
        if self._is_mine():
            self._put(self._counting.step(line))

    def event(self, line: dict[str, Any]) -> None:
        """Hands on an event."""
        if self._is_mine():
            self._put(event_of(hidden_tree(line)))

    def close(self) -> None:
        """Writes what is left and ends what was started, within reason."""
        if not self._is_mine():
            return
        self._open = False
        _unfinished.discard(self)
        end = time.monotonic() + _END_SECONDS
        for writer in self._writers:
            writer.end()
        for writer in self._writers:
            writer.wait(end - time.monotonic())

    def _is_mine(self) -> bool:
        # A copy of the process, made to replay a step, writes nothing.
        return self._open and os.getpid() == self._pid

    def _put(self, item: Step | TrackedEvent) -> None:
        for writer in self._writers:
            writer.put(item)

    def at_exit(self) -> None:
        """Does what ``close`` does, as nobody else has."""
        if self._before_exit is not None and self._is_mine():
            self._before_exit()
        self.close()


class Writer:
    """One tracker in its thread.

    Attributes:
        tracker: The tracker.
        lost: How many lines could not be written.
    """

    def __init__(self, tracker: Tracker, on_failure: Callable[[str], None]) -> None:
        self.tracker = tracker
        self.lost = 0
        self._on_failure = on_failure
        self._failed = False
        self._items: queue.Queue[Step | TrackedEvent | None] = queue.Queue(_QUEUE)
        self._thread: threading.Thread | None = None

    def put(self, item: Step | TrackedEvent) -> None:
        """Adds an item; never waits."""
        if self._thread is None and not self._failed:
            self._begin()
        try:
            self._items.put_nowait(item)
        except queue.Full:
            self.lost += 1

    def end(self) -> None:
        """Asks the thread to end."""
        if self._thread is not None:
            try:
                self._items.put_nowait(None)
            except queue.Full:
                self._fail("it is too far behind")

    def wait(self, seconds: float) -> None:
        """Waits for the thread to end."""
        if self._thread is not None:
            self._thread.join(max(seconds, 0.0))
        if self._thread is None or self._thread.is_alive():
            self.lost += self._items.qsize()
        if self._thread is not None and self._thread.is_alive():
            self._fail(f"it has not answered for {_END_SECONDS:.0f} s")
        if self.lost:
            self._on_failure(f"{self.lost} lines to {self.tracker.name}")

    def _begin(self) -> None:
        try:
            self.tracker.adopt()
        except Exception as error:  # noqa: BLE001 - a library's own, and no reason to stop
            self._fail(error)
        name = f"nanguard-{self.tracker.name}"
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the interpreter is ending, or there are too many
            self._fail(error)
            return
        self._thread = thread

    def _work(self) -> None:
        try:
            self.tracker.start()
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(error)
            self._drain()
            return
        ended = False
        while not ended:
            ended = self._write_batch()
        self._try(self.tracker.finish)

    def _write_batch(self) -> bool:
        """Writes what comes within a moment; returns whether it was the last."""
        item = self._items.get()
        deadline = time.monotonic() + _BATCH_SECONDS
        while item is not None:
            self._write(item)
            try:
                item = self._items.get(timeout=max(deadline - time.monotonic(), 0.0))
            except queue.Empty:
                break
        self._try(self.tracker.flush)
        return item is None

    def _write(self, item: Step | TrackedEvent) -> None:
        write: Any = self.tracker.step if isinstance(item, Step) else self.tracker.event
        self._try(write, item)

    def _drain(self) -> None:
        """Counts what comes for a tracker that could not be started."""
        while self._items.get() is not None:
            self.lost += 1

    def _try(self, call: Callable[..., None], *args: Any) -> None:
        held = self.tracker.held
        try:
            call(*args)
        except Exception as error:  # noqa: BLE001 - a library's own, and no reason to stop
            # The line itself, and with it what was held back.
            self.lost += max(1, held - self.tracker.held + len(args))
            self._fail(error)

    def _fail(self, why: Exception | str) -> None:
        if not self._failed:
            self._failed = True
            said = why if isinstance(why, str) else f"{type(why).__name__}: {why}"
            self._on_failure(f"to {self.tracker.name} ({said[:500]})")


_unfinished: set[Trackers] = set()


@cache
def _finish_at_exit() -> None:
    """Has what is unfinished at the end of the process finished, once for all.

    It has to be before the libraries end what they have begun, and before Python refuses to
    start anything: such hooks are those of the threads, which only Python itself uses so far.
    """
    register = getattr(threading, "_register_atexit", atexit.register)
    register(_finish_all)


def _finish_all() -> None:
    for trackers in list(_unfinished):
        trackers.at_exit()
