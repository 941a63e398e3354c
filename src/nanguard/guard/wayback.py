"""Snapshots in the life of a run: when they are taken and trusted, and the way back to a place.

A place is a step, a batch, and the random numbers that come next.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from nanguard.errors import SnapshotError, UsageError
from nanguard.guard import events
from nanguard.guard.optimizers import hyperparameters, set_hyperparameters
from nanguard.guard.parts import trained
from nanguard.snapshots.disk import from_portable, portable
from nanguard.snapshots.manager import GUARD

if TYPE_CHECKING:
    from nanguard.guard.flights import Flight, Flights
    from nanguard.guard.parts import Parts
    from nanguard.snapshots.manager import Recovery
    from nanguard.snapshots.training_state import Snapshot


class Place:
    """The state of a guard: the place in the run, and what its steps taught the guard.

    As a part of a snapshot it holds the place only; what was learned is added when the step
    before the snapshot is known to be good.
    """

    def __init__(self, parts: Parts, flights: Flights) -> None:
        self._parts = parts
        self._flights = flights

    def state_dict(self) -> dict[str, Any]:
        """Returns the place now, as if every step in flight were good."""
        return {"moment": self.moment(None)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a place, with the next watched loop."""
        self.refuse_inside_loop("guard.load_state_dict(state)")
        ranks, rank = state.get("ranks", []), self._parts.ranks.rank
        moment = from_portable(ranks[rank] if rank < len(ranks) else state["moment"])
        if rank >= len(ranks) and state.get("rank", rank) != rank:
            # With the random streams of another rank, both would draw the same from now on.
            mark = {**moment["mark"], "streams": self._parts.streams.capture()}
            moment = {**moment, "mark": mark}
        self._refuse_other_model(state.get("shapes"))
        _check(moment, state["learned"])
        self._learn(state["learned"])
        self._parts.unchanged.load(moment["mark"])
        self._flights.go_to(moment)

    def refuse_inside_loop(self, where: str) -> None:
        """Refuses to go to another place while batches of this one are being given out."""
        if self._flights.feed is not None:
            raise UsageError(
                "the guard's state was loaded inside of a watched loop.",
                where=where,
                do="Load it before the loop, then go on from guard.epoch.",
            )

    def shapes(self) -> dict[str, list[int]]:
        """Returns the shapes of the trained parameters, by which a model is known."""
        found = trained(self._parts.models, self._parts.optimizers)
        return {name: list(parameter.shape) for name, parameter in found.items()}

    def _refuse_other_model(self, shapes: dict[str, list[int]] | None) -> None:
        mine = self.shapes()
        if shapes is None or shapes == mine:
            return
        name = next(n for n in [*mine, *shapes] if mine.get(n) != shapes.get(n))
        raise SnapshotError(
            f"the saved state is of another model: parameter {name} has shape "
            f"{shapes.get(name, 'none')} there and {mine.get(name, 'none')} here.",
            where="guard.load_state_dict(state)",
            do="Resume with the model that the checkpoint was made with, or begin anew.",
        )

    def moment(self, before: Flight | None) -> dict[str, Any]:
        """Returns the place before a step, or the place now."""
        flights = self._flights
        position = flights.feed.upcoming if flights.feed is not None else 0
        began = flights.feed.began if flights.feed is not None else None
        if before is not None:
            mark, began = before.mark.to_dict(), before.began
            position = before.batches[0][0] if before.batches else position
        elif flights.void is not None:
            mark = flights.void.to_dict()
        else:
            mark = {"streams": self._parts.streams.capture()}
        plain: dict[str, Any] = portable(
            {
                "step": flights.steps if before is None else before.step,
                "update": flights.updates if before is None else before.update,
                "epoch": flights.epoch if before is None else before.epoch,
                "position": position,
                "began": began,
                "mark": mark,
            }
        )
        return plain

    def learned(self) -> dict[str, Any]:
        """Returns what the steps taught the guard."""
        return {
            **self._parts.verdicts.state_dict(),
            "counts": self._parts.journal.summary.counts(),
            "losses": list(self._parts.journal.losses),
        }

    def _learn(self, learned: dict[str, Any]) -> None:
        self._parts.verdicts.load_state_dict(learned)
        self._parts.journal.summary.load_counts(learned["counts"])
        self._parts.journal.losses = list(learned["losses"])


def _check(moment: dict[str, Any], learned: dict[str, Any]) -> None:
    """Refuses a place that cannot be one; the file may be a stranger's."""
    counts = [moment[name] for name in ("step", "update", "epoch", "position")]
    total, count = learned["losses"]
    factors = [learned["policy"]["lr_factor"], *learned["policy"]["known"]]
    if (
        not all(type(number) is int and number >= 0 for number in counts)
        or not all(isinstance(number, (int, float)) for number in (total, count))
        or not all(0.0 < factor <= 1.0 for factor in factors)
    ):
        raise SnapshotError(
            "the saved state does not name a place in a run: its step, update, epoch, position, "
            "mean loss or learning-rate factor cannot be right.",
            where="guard.load_state_dict(state)",
            do="Use another snapshot or checkpoint; this one was damaged or made by hand.",
        )


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
