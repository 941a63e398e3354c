"""Snapshots in the life of a run: when they are taken, when they are trusted, and the way back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.guard import events
from nanguard.recovery.manager import GUARD

if TYPE_CHECKING:
    from nanguard.guard.flight import Flight
    from nanguard.guard.parts import Parts
    from nanguard.guard.place import Place
    from nanguard.recovery.manager import Recovery
    from nanguard.recovery.memory import Snapshot


class WayBack:
    """Keeps a good state to go back to.

    All ranks take a snapshot or none does, and it is good on all of them or on none, so that they
    can only ever go back to the same one.

    Attributes:
        recovery: The snapshots.
        suspicious: Steps after which the parameters are to be scanned out of turn.
    """

    def __init__(self, parts: Parts, recovery: Recovery, place: Place) -> None:
        self._parts = parts
        self._place = place
        self.recovery = recovery
        self.suspicious: set[int] = set()

    def before_update(self, update: int) -> None:
        """Call before the weights change: there must be a good state to go back to."""
        if self.recovery.wants_first:
            first = self._take(update, -1)
            if first is not None:
                self.recovery.settle(first, good=True)
        self.recovery.memory.fence()

    def after_update(self, flight: Flight, update: int) -> None:
        """Takes a snapshot if one is due; it counts once the step is known to be good."""
        if self.recovery.is_due(update):
            flight.snapshot = self._take(update, flight.step)

    def settle(self, flight: Flight, *, good: bool) -> None:
        """Ends the snapshot that was taken after a step which is now known."""
        if flight.snapshot is None:
            return
        journal, snapshot = self._parts.journal, flight.snapshot
        if good:
            snapshot.tree[GUARD]["learned"] = self._place.learned()
        if self.recovery.settle(snapshot, good=good):
            journal.summary.snapshots += 1
        elif good:
            self._refuse(snapshot.update, flight.step)

    def is_due_together(self, update: int) -> bool:
        """Returns whether all ranks are to write a snapshot together, with nothing in flight."""
        return self.recovery.sharded is not None and self.recovery.is_due_on_disk(update)

    def write_together(self, update: int, step: int) -> None:
        """Lets all ranks write a snapshot of the run as it is now."""
        moments = self._parts.ranks.gather(self._place.moment(None))
        guard = {"moment": moments[0], "ranks": moments, "learned": self._place.learned()}
        bad = self._parts.gate.latch > 0
        if not self.recovery.write_together(update, step, guard, bad):
            self._refuse(update, step)

    def _take(self, update: int, step: int) -> Snapshot | None:
        ranks = self._parts.ranks
        if not ranks.smallest(int(self.recovery.is_ready(update))):
            return None
        snapshot = self.recovery.take(update, step, self._parts.gate.latch > 0)
        if ranks.world > 1 and self.recovery.disk and self.recovery.is_due_on_disk(update):
            snapshot.tree[GUARD]["ranks"] = ranks.gather(self._place.moment(None))
        return snapshot

    def _refuse(self, update: int, step: int) -> None:
        message = f"the state after update {update} is not finite everywhere"
        self._parts.journal.say(events.SNAPSHOT_REJECTED(message, step=step))
        # All ranks have heard of it by then, however early one of them looked.
        self.suspicious.add(step + self._parts.lag + 1)
