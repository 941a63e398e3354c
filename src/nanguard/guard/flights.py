"""Steps in flight: given out, applied on the device, and not yet seen by the host.

The order of things is the same on every rank and does not depend on how fast a device is: the
host looks at a step exactly ``lag`` steps later. If that step was bad, everything since then was
a no-op on the device; the host puts its own side back, and the batches are given out again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from nanguard.errors import NonFiniteError
from nanguard.guard import events
from nanguard.guard.gate import InFlight
from nanguard.guard.optimizers import state_tensors
from nanguard.guard.parts import BadStep, trained
from nanguard.guard.policy import Action, Trouble
from nanguard.guard.verdicts import Reading, StepLimits, Symptom
from nanguard.numerics import all_finite

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from nanguard.findings import Finding
    from nanguard.guard.batches import Drawn, Feed, Kept
    from nanguard.guard.gate import Gate, Ticket
    from nanguard.guard.journal import WrittenIncident
    from nanguard.guard.parts import Parts
    from nanguard.guard.policy import Decision
    from nanguard.guard.ranks import Ranks
    from nanguard.guard.unchanged import Mark
    from nanguard.guard.wayback import WayBack
    from nanguard.snapshots.manager import Recovery
    from nanguard.snapshots.training_state import Snapshot


@dataclass(slots=True)
class Flight:
    """One step, from its first batch until the host knows how it went.

    Attributes:
        step: Its number among all steps that were tried.
        update: How many updates came before it.
        epoch: The pass over the data that it began in.
        began: The random streams at the start of that pass; None outside of a watched loop.
        mark: How the host's side of the run was before it.
        batches: The batches that were given out for it.
        written: The numbers about it that are on the gate's board: the loss and its terms.
        backwards: How often backward was called.
        seen_backwards: How often it had been called when the last batch was given out.
        lane: Which optimizers it steps: the index of one, or -1 for all of them.
        limits: What its loss and gradient norm are held to.
        lr: Its learning rate.
        lr_factor: What the scheduled learning rate is multiplied with.
        tickets: Its numbers, on their way to the host.
        suspects: The parameters whose gradients the host saw to be bad.
        searched: Whether an optimizer evaluated the loss by itself, several times.
        passed: Whether it is a good step that a replay goes past without making it.
        snapshot: A snapshot taken after it, good only if the step is.
    """

    step: int
    update: int
    epoch: int
    began: dict[str, Any] | None
    mark: Mark
    batches: list[Drawn] = field(default_factory=list)
    written: dict[str, None] = field(default_factory=dict)
    backwards: int = 0
    seen_backwards: int = 0
    lane: int = -1
    limits: StepLimits = field(default_factory=StepLimits)
    lr: float | None = None
    lr_factor: float = 1.0
    tickets: list[Ticket] = field(default_factory=list)
    suspects: list[str] = field(default_factory=list)
    searched: bool = False
    passed: bool = False
    snapshot: Snapshot | None = None

    @property
    def begun(self) -> bool:
        """Whether anything belongs to it yet."""
        return bool(self.batches or self.written)

    @property
    def passed_over(self) -> bool:
        """Whether its last batch came and went without a backward pass."""
        return bool(self.batches) and self.backwards == self.seen_backwards

    def sum(self, gate: Gate, name: str, value: Tensor) -> None:
        """Adds to one of its numbers, on the gate's board."""
        if name in self.written:
            gate.add(name, value)
        else:
            self.written[name] = None
            gate.write(name, value)

    def read(self) -> Reading:
        """Returns its numbers; waits for the device if they are not there yet."""
        values: dict[str, float] = {}
        for ticket in self.tickets:
            values.update(ticket.read())
        return Reading.of(values)


_ADVICE = (
    "The weights are those of the last good step or snapshot and can be saved. Look at the batch "
    "and the values named above; guard.summary() lists what happened before."
)

# Borders between batches that a snapshot may wait for one without accumulated gradients.
_PATIENCE = 16
_ADVICE_IF_LOST = (
    "The state of the run is bad and there is no good snapshot of it: go back to an earlier "
    "checkpoint. guard.summary() lists what happened before."
)


class Flights:
    """Follows every step until its verdict is known, and acts on it.

    Attributes:
        way_back: The snapshots.
        feed: Where batches come from; None outside of a watched loop.
        open: The step that is being built.
        void: Set after a bad step until the next batch: the rest of the loop's body is void.
        resume: The place that the next watched loop is to begin at; None for its own beginning.
        steps: How many steps were tried.
        updates: How many of them count, as far as the host knows.
        epoch: How many passes over the data are complete.
        several_steps: Whether a loop's body takes several steps, each of which needs a beginning
            of its own.
        driven: Whether somebody else owns the loop, and tells where a batch begins and ends.
        settled: The last step whose verdict is known, and what was done with it; None before that.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._in_flight: InFlight[Flight, Reading] = InFlight(
            Flight.read, lambda seen: not (seen.closed or seen.poisoned), self._accept
        )
        self.several_steps = len(parts.optimizers) > 1
        self._postponed = 0
        self._missed_step = False
        self.driven = False
        self.settled: tuple[int, Action] | None = None
        self.way_back: WayBack
        self.feed: Feed | None = None
        self.void: Mark | None = None
        self.resume: dict[str, Any] | None = None
        self.steps = self.updates = self.epoch = 0
        self.open: Flight | None = self.new()

    def begin(self) -> Flight:
        """Returns the step that is being built; begins one if there is none."""
        if self.open is None:
            # A second step for one batch, the first time. The buffers that are put back if it is
            # bad are those from before the batch, as its forward pass has changed them already.
            self.several_steps = True
            self.open = self.new(buffers=False)
        return self.open

    @property
    def watched(self) -> bool:
        """Whether it is known where each batch begins, so that a step can be taken back to it."""
        return self.feed is not None or self.driven

    def between(self) -> None:
        """Lets a recorder know, between two steps, that the next one is about to begin."""
        recorder = self._parts.recorder
        begun = self.open is not None and self.open.begun
        if recorder is not None and not begun and not self._in_flight:
            recorder.between(self.steps)

    def ahead(self, lane: int | None = None) -> int:
        """Returns how many steps, of one lane or of all, the host has not seen yet."""
        if lane is None:
            return len(self._in_flight)
        return sum(flight.lane == lane for flight in self._in_flight)

    def launch(self, flight: Flight, *, keep: int) -> None:
        """Takes a step that was handed to the device; looks at those before it.

        Args:
            flight: The step.
            keep: How many steps may stay unseen.
        """
        if self._parts.recorder is not None:
            self._parts.recorder.launched(flight.step)
        self.steps += 1
        self.updates += 1
        self._in_flight.append(flight)
        self.open = None
        self.way_back.after_update(self.updates)
        self.resolve(keep=keep)
        if self.void is not None:
            return
        if not self.watched:
            self.take_snapshot()
            self.between()
        if not self.watched or (self.several_steps and not self.driven):
            self.open = self.new()

    def resolve(self, *, keep: int) -> None:
        """Looks at the oldest steps until few enough are left; acts on the first bad one."""
        bad = self._in_flight.settle(keep=keep)
        if bad is not None:
            self._act(*bad)

    def accept_good(self) -> None:
        """Looks at the oldest steps until one is bad."""
        self._in_flight.settle()

    def first_unsettled(self) -> Flight | None:
        """Returns the oldest step that is in flight, or the open one if anything belongs to it."""
        first = next(iter(self._in_flight), self.open)
        return first if first is not None and first.begun else None

    def abandon(self) -> None:
        """Ends what is in flight when the loop is left before its end, without the other ranks."""
        bad = self._in_flight.settle()
        self.end_void()
        if bad is not None:
            flight, reading = bad
            lost = self._rewind(flight)
            message = f"the loop was left while step {flight.step} was bad"
            more = f"; {lost} steps after it did not count either" if lost else ""
            self._close(flight, reading, Action.SKIP)
            self._parts.journal.say(events.LOOP_LEFT(message + more, step=flight.step), Action.SKIP)
            self.end_void()
        elif self.open is not None and self.open.begun and self._is_unwanted(self.open):
            self._parts.unchanged.restore(self.open.mark, streams=self.watched)
            self._zero_grad()
        self.open = None

    def miss_step(self) -> None:
        """Says so, once, if there were backward passes and no step at all."""
        passes = 0 if self.open is None else self.open.backwards
        if passes and not self.steps and not self.driven and not self._missed_step:
            self._missed_step = True
            many = f"{passes} backward pass{'' if passes == 1 else 'es'}"
            message = f"{many} and no guard.step(): nothing is trained"
            self._parts.journal.say(events.STEP_FORGOTTEN(message, step=0))

    def look_at_the_end(self) -> None:
        """Says so if the run ends in a state that the last scan has not seen and that is bad."""
        poison = poison_in(self._parts, self.way_back.recovery.finite_buffers())
        if poison is not None:
            message = f"the run ends with non-finite values: {poison}"
            self._parts.journal.say(
                events.NON_FINITE_PARAMETER(message, step=max(self.steps - 1, 0), where=poison)
            )

    def _is_unwanted(self, flight: Flight) -> bool:
        """Returns whether a step that never came to its end is to leave nothing behind.

        One that was interrupted is. Batches that were too few for a last step are not, as they
        would not be without a guard, unless they are bad.
        """
        if not flight.backwards:
            return not all_finite(self.way_back.recovery.finite_buffers().values())
        return self.watched or not math.isfinite(float(self._parts.gate["loss"]))

    def go_to(self, moment: dict[str, Any]) -> None:
        """Continues from a place in the run with the next watched loop."""
        self.steps, self.updates = moment["step"], moment["update"]
        self.epoch = moment["epoch"]
        self._in_flight.clear()
        self.way_back.forget()
        self._parts.gate.open()
        self.resume = moment
        self.open = self.new()

    def new(self, *, buffers: bool = True) -> Flight:
        """Begins a step here.

        Args:
            buffers: Whether to copy the buffers as they are now, for the case that it is bad.
        """
        # What a framework steps by itself, it steps also after a bad step.
        late = self._parts.lag > 0 or self.driven
        unchanged, latch = self._parts.unchanged, self._parts.gate.latch
        if buffers:
            unchanged.hold()
        mark = unchanged.mark_for_late_host(latch) if late else unchanged.mark()
        began = None if self.feed is None else self.feed.began
        return Flight(self.steps, self.updates, self.epoch, began, mark)

    def take_snapshot(self) -> None:
        """Takes the snapshot that is due, now that the loop's body is over."""
        if not self.way_back.due:
            return
        if self.open is not None and self.open.backwards and self._postponed < _PATIENCE:
            # Gradients are no part of a snapshot. Most loops have none between some two batches.
            self._postponed += 1
            return
        self._postponed = 0
        if self.way_back.due_together:
            self.settle()
        last = self._in_flight[-1] if self._in_flight else None
        self.way_back.take_due(last, self.updates, self.steps - 1)

    def settle(self) -> None:
        """Looks at all steps in flight, and ends what a bad one made void."""
        self.resolve(keep=0)
        self.end_void()

    def kept(self) -> list[Kept]:
        """Returns the batches that may have to be given out again."""
        flights = [*self._in_flight, *([self.open] if self.open else [])]
        return [kept for flight in flights for _, kept in flight.batches]

    def _accept(self, flight: Flight, reading: Reading) -> None:
        parts, journal = self._parts, self._parts.journal
        for finding in parts.verdicts.passed(flight.lane, reading, flight.limits, flight.step):
            journal.say(finding)
        self._close(flight, reading, Action.OVERFLOW if reading.overflow else Action.STEP)
        self._check_batches(flight)
        self.way_back.settle(flight, good=True)

    def _check_batches(self, flight: Flight) -> None:
        keeper = self._parts.keeper
        known = keeper.reason
        for _, kept in flight.batches:
            keeper.check(kept)
        if keeper.reason != known and keeper.reason is not None and self._parts.lag:
            message = f"{keeper.reason}, so batches are copied from now on"
            self._parts.journal.say(events.BATCH_REUSED(message, step=flight.step))

    def _act(self, flight: Flight, reading: Reading) -> None:
        parts = self._parts
        if flight.passed:
            self._rewind(flight, streams=False)
            return
        # What a bad batch did to the buffers is undone before they are looked at, and what a
        # scan found in them is looked at before it is undone.
        if not reading.poisoned:
            parts.journal.summary.rerun += self._rewind(flight)
        incident = examine(flight, reading, parts, self.way_back.recovery)
        if reading.poisoned:
            parts.journal.summary.rerun += self._rewind(flight)
        trouble = Trouble(flight.step, incident.poisoned, incident.can_roll_back)
        if parts.recorder is not None:
            trouble = parts.recorder.with_known(trouble)
        decision = parts.verdicts.failed(flight.lane, reading, trouble)
        stopped = decision.action is Action.STOP
        if decision.action is Action.ROLLBACK or (
            stopped and incident.poisoned and incident.can_roll_back
        ):
            self._roll_back()
        self._close(flight, reading, decision.action)
        quiet = bool(trouble.known) and decision.action is Action.SKIP
        event = parts.journal.note(incident.finding, decision.action, decision.reason, quiet=quiet)
        event = replace(event, tells=parts.ranks.tells_of(incident.rank))
        try:
            event = replace(event, incident=self._record(flight, incident, decision))
        finally:  # Ctrl-C ends an explanation, and whoever is told knows of the step all the same
            parts.journal.call_back(event)
        if stopped:
            lost = incident.poisoned and not incident.can_roll_back
            advice = _ADVICE_IF_LOST if lost else _ADVICE
            culprit = "" if parts.recorder is None else parts.recorder.culprit()
            why = f"{decision.reason}{': ' if culprit else ''}{culprit}"
            raise NonFiniteError(incident.finding, do=f"{why}. {advice}")

    def _record(
        self, flight: Flight, incident: JudgedStep, decision: Decision
    ) -> WrittenIncident | None:
        """Has a bad step written down and explained; returns its incident."""
        if self._parts.recorder is None or not incident.reports:
            return None
        return self._parts.recorder.bad(
            BadStep(
                flight.step,
                incident.symptom,
                decision,
                alone=incident.alone,
                batches=[(index, kept.give()) for index, kept in flight.batches if not kept.stale],
            )
        )

    def _rewind(self, bad: Flight, *, streams: bool = True) -> int:
        """Puts everything back to how it was before a bad step; returns the steps after it."""
        parts = self._parts
        gated = [flight for flight in self._in_flight if flight is not bad]
        for flight in self._in_flight:
            self.way_back.settle(flight, good=False)
        unfinished = [*gated, *([self.open] if self.open else [])]
        self._in_flight.clear()
        self.open = None
        if self.feed is not None:
            self._give_back(self.feed, [d for flight in unfinished for d in flight.batches])
        parts.unchanged.restore(bad.mark, streams=streams and self.watched)
        parts.gate.open()
        parts.scaling.forget()
        self._zero_grad()
        self.steps, self.updates = bad.step + 1, bad.update
        self._make_void()
        return len(gated)

    def _zero_grad(self) -> None:
        for optimizer in self._parts.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _make_void(self) -> None:
        """Lets nothing that the loop's body still does have an effect, until the next batch."""
        if not self.watched:
            self.open = self.new()
        else:
            self.void = self.new().mark

    def end_void(self) -> None:
        """Undoes what the loop's body did after a bad step."""
        if self.void is not None:
            self._parts.unchanged.restore(self.void)
            self.void = None

    def _give_back(self, feed: Feed, batches: list[Drawn]) -> None:
        for index, kept in batches:
            self._parts.keeper.check(kept)
            if kept.stale:
                message = f"batch {index} cannot run again: it was overwritten meanwhile"
                self._parts.journal.say(events.BATCH_LOST(message, step=self.steps))
        feed.give_back([drawn for drawn in batches if not drawn[1].stale])

    def _roll_back(self) -> None:
        before = self.updates
        self.updates = self.way_back.roll_back()
        self._parts.journal.summary.lost_updates += before - self.updates
        self._make_void()

    def _close(self, flight: Flight, reading: Reading, action: Action) -> None:
        """Counts a step that is over and adds its line to the record."""
        self.settled = (flight.step, action)
        summary = self._parts.journal.summary
        summary.steps += 1
        summary.applied += action is Action.STEP
        summary.overflows += action is Action.OVERFLOW
        self._parts.journal.step(
            reading,
            action,
            step=flight.step,
            update=flight.update,
            epoch=self.epoch,
            lr=flight.lr,
        )


@dataclass(frozen=True, slots=True)
class JudgedStep:
    """A bad step.

    Attributes:
        finding: What was wrong with it, on the rank where it began.
        poisoned: Whether parameters, buffers or optimizer state are non-finite, on any rank.
        can_roll_back: Whether there is a good snapshot, on all ranks.
        symptom: What was seen of it, here.
        rank: Where it began; the first rank if nobody knows.
        reports: Whether this rank tells about it.
        alone: Whether this rank is known to be the one at fault.
    """

    finding: Finding
    poisoned: bool
    can_roll_back: bool
    symptom: Symptom
    rank: int = 0
    reports: bool = True
    alone: bool = True


def examine(flight: Flight, reading: Reading, parts: Parts, recovery: Recovery) -> JudgedStep:
    """Looks at a bad step with all the time in the world; all ranks look together.

    Args:
        flight: The step.
        reading: Its numbers.
        parts: The run.
        recovery: Its snapshots.
    """
    ranks = parts.ranks
    seen = _as_seen_here(reading, flight, ranks)
    symptom = Symptom.of(seen, flight.limits)
    mine = symptom.finding(flight.step)
    if flight.suspects and mine.name == events.NON_FINITE_GRADIENT.name:
        symptom.names = list(flight.suspects)
        mine = replace(mine, where=f"gradient of {listed(flight.suspects)}")
    poison = poison_in(parts, recovery.finite_buffers())
    if poison is not None:
        # Seen by a scan after this step, or by its loss: then the step before left it so.
        after = flight.step if reading.poisoned else flight.step - 1
        message = f"not finite after step {after}: {poison}"
        if after < 0:
            message = f"not finite since the first forward pass: {poison}"
        mine = events.NON_FINITE_PARAMETER(message, step=max(after, 0), where=poison)
        symptom.where, symptom.kind, symptom.names = _owner_of(poison), "nan", [poison]
    began_here = not (math.isfinite(reading.loss) and reading.loss <= flight.limits.loss.act)
    poisoned = reading.poisoned or poison is not None
    told = ranks.gather((began_here, JudgedStep(mine, poisoned, recovery.can_roll_back, symptom)))
    incidents = [incident for _, incident in told]
    first = next((rank for rank, (here, _) in enumerate(told) if here), None)
    finding = incidents[first or 0].finding
    if ranks.world > 1 and first is not None:
        finding = replace(finding, rank=first, message=f"rank {first}: {finding.message}")
    # A gradient that is bad by itself was reduced over the ranks, so that it may be anyone's.
    anyone = first is None and symptom.where == "gradient" and symptom.kind != "spike"
    return JudgedStep(
        finding,
        poisoned=any(incident.poisoned for incident in incidents),
        can_roll_back=all(incident.can_roll_back for incident in incidents),
        symptom=symptom,
        rank=first or 0,
        reports=ranks.world == 1 or anyone or ranks.rank == (first or 0),
        alone=ranks.world == 1 or not anyone,
    )


def _owner_of(poison: str) -> str:
    """Returns what kind of state is not finite."""
    words = poison.split()[:4]
    if "buffer" in words:
        return "buffer"
    return "optimizer state" if "optimizer" in words else "parameter"


def _as_seen_here(reading: Reading, flight: Flight, ranks: Ranks) -> Reading:
    """Returns a reading without the NaN that this rank itself sent through its gradient."""
    spiked = math.isfinite(reading.loss) and not reading.loss <= flight.limits.loss.act
    if ranks.channel == "gradient" and spiked:
        return replace(reading, grad_norm=0.0)
    return reading


def poison_in(parts: Parts, buffers: Mapping[str, Tensor]) -> str | None:
    """Returns what is non-finite in the run itself, in words; None if nothing is."""
    for word, tensors in (
        ("parameter", trained(parts.models, parts.optimizers)),
        ("buffer", buffers),
    ):
        if not all_finite(tensors.values()):
            bad = [name for name, tensor in tensors.items() if not all_finite([tensor])]
            return f"{word} {listed(bad)}"
    if not all_finite(state_tensors(parts.optimizers)):
        return "state of the optimizer"
    return None


def listed(names: Sequence[str]) -> str:
    """Returns a few names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
