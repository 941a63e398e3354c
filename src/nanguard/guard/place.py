"""Where a run is: which step, which batch, which random numbers come next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanguard.errors import SnapshotError, UsageError
from nanguard.guard.models import trained
from nanguard.snapshots.disk import from_portable, portable

if TYPE_CHECKING:
    from nanguard.guard.flights import Flight, Flights
    from nanguard.guard.parts import Parts


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
