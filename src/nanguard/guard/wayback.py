"""Snapshots in the life of a run: when they are taken, when they are trusted, and the way back."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from nanguard.guard import events
from nanguard.guard.optimizers import hyperparameters, set_hyperparameters
from nanguard.snapshots.manager import GUARD

if TYPE_CHECKING:
    from nanguard.guard.flights import Flight
    from nanguard.guard.parts import Parts
    from nanguard.guard.place import Place
    from nanguard.snapshots.manager import Recovery
    from nanguard.snapshots.training_state import Snapshot


class WayBack:
    """Keeps a good state to go back to.

    All ranks take a snapshot or none does, and it is good on all of them or on none, so that they
    can only ever go back to the same one.

    Attributes:
        recovery: The snapshots.
        suspicious: Steps after which the parameters are to be scanned out of turn.
        due: Whether a snapshot is to be taken before the next batch.
    """

    def __init__(self, parts: Parts, recovery: Recovery, place: Place) -> None:
        self._parts = parts
        self._place = place
        self.recovery = recovery
        self.suspicious: set[int] = set()
        self.due = False
        self._due_on_disk = False

    def before_update(self, update: int) -> None:
        """Call before the weights change: there must be a good state to go back to."""
        if self.recovery.wants_first():
            first = self._take(update, -1, on_disk=False)
            if first is not None:
                self.recovery.settle(first, good=True)
        self.recovery.memory.fence()

    def after_update(self, update: int) -> None:
        """Notes whether a snapshot is due; it is taken when the loop's body is over."""
        self._due_on_disk = self._due_on_disk or self.recovery.is_due_on_disk(update)
        self.due = self.due or self._due_on_disk or self.recovery.is_due_in_memory(update)

    @property
    def due_together(self) -> bool:
        """Whether all ranks are to write the snapshot that is due, with nothing in flight."""
        return self._due_on_disk and self.recovery.sharded is not None

    def take_due(self, last: Flight | None, update: int, step: int) -> None:
        """Takes the snapshot that is due; it counts once the step before it is known to be good.

        Args:
            last: That step, if the host has not seen it yet.
            update: How many updates the run has seen.
            step: The number of that step.
        """
        together, on_disk = self.due_together, self._due_on_disk
        self.due = self._due_on_disk = False
        snapshot = self._take(update, step, on_disk=on_disk and not together)
        if snapshot is not None and last is not None:
            last.snapshot = snapshot
        elif snapshot is not None:
            self._end(snapshot)
        if together:
            self._write_together(update, step)

    def roll_back(self) -> int:
        """Puts the run back to the last good snapshot; returns its number of updates."""
        if self._parts.scheduler_every == "step":
            return self.recovery.roll_back()
        # Epochs are not taken back, so neither is a schedule that counts them.
        optimizers, schedulers = self._parts.optimizers, self._parts.schedulers
        rates = hyperparameters(optimizers)
        schedules = [copy.deepcopy(scheduler.state_dict()) for scheduler in schedulers]
        update = self.recovery.roll_back()
        set_hyperparameters(optimizers, rates)
        for scheduler, state in zip(schedulers, schedules, strict=True):
            scheduler.load_state_dict(state)
        return update

    def forget(self) -> None:
        """Lets go of snapshots in memory: the run goes on somewhere else."""
        self.recovery.memory.forget()
        self.suspicious.clear()
        self.due = self._due_on_disk = False

    def settle(self, flight: Flight, *, good: bool) -> None:
        """Ends the snapshot that was taken after a step which is now known."""
        if flight.snapshot is None:
            return
        if good:
            self._end(flight.snapshot)
        else:
            self.recovery.settle(flight.snapshot, good=False)

    def _end(self, snapshot: Snapshot) -> None:
        snapshot.tree[GUARD]["learned"] = self._place.learned()
        if self.recovery.settle(snapshot, good=True):
            self._parts.journal.summary.snapshots += 1
        else:
            self._refuse(snapshot.update, snapshot.step)

    def _write_together(self, update: int, step: int) -> None:
        moments = self._parts.ranks.gather(self._place.moment(None))
        guard = {"moment": moments[0], "ranks": moments, "learned": self._place.learned()}
        bad = self._parts.gate.latch > 0
        if not self.recovery.write_together(update, step, guard, bad):
            self._refuse(update, step)

    def _take(self, update: int, step: int, *, on_disk: bool) -> Snapshot | None:
        ranks = self._parts.ranks
        if not ranks.smallest(int(self.recovery.is_ready(update))):
            return None
        snapshot = self.recovery.take(update, step, self._parts.gate.latch > 0, on_disk=on_disk)
        if ranks.world > 1 and on_disk:
            snapshot.tree[GUARD]["ranks"] = ranks.gather(self._place.moment(None))
        return snapshot

    def _refuse(self, update: int, step: int) -> None:
        message = f"the state after update {update} is not finite everywhere"
        self._parts.journal.say(events.SNAPSHOT_REJECTED(message, step=step))
        # All ranks have heard of it by then, however early one of them looked.
        self.suspicious.add(step + self._parts.lag + 1)
