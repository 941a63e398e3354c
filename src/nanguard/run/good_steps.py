"""The good steps of a script: written down, and looked at for what is unusual about them.

That is done for several steps at a time. What runs once in a step finds nothing of itself in the
processor's caches any more, and takes several times as long as what runs again and again.
"""

from __future__ import annotations

import math
import os
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nanguard.errors import NanguardError, RecordError
from nanguard.guard.journal import Event
from nanguard.guard.optimizers import largest_rate, learning_rate
from nanguard.guard.verdicts import Reading
from nanguard.numerics import whole
from nanguard.record import RunRecord
from nanguard.trackers import TRACK, trackers_for
from nanguard.trackers.tracker import incident_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nanguard.guard.policy import Decision
    from nanguard.guard.verdicts import Symptom
    from nanguard.run.live import Live
    from nanguard.trackers import Trackers

# Steps that wait to be looked at, and how many seconds they may wait: whoever follows the record
# of a run hardly notices, and a step of 20 ms pays for a twentieth of a look.
_MOST_WAITING = 64
_SOON = 0.5


class Numbers(NamedTuple):
    """What is known of the numbers of a step.

    Attributes:
        loss: The sum of its losses.
        grad_norm: The norm of its gradients.
        scale: The scale of its loss.
    """

    loss: float | None
    grad_norm: float | None
    scale: float | None = None


class GoodStep(NamedTuple):
    """A step that was made.

    Attributes:
        optimizer: Whose step it is; None in a script that has none.
        step: Its number.
        numbers: What is known of its numbers.
        rate: The learning rate it was made with; None if that is not known.
        time: When it was made, in seconds since 1970.
    """

    optimizer: weakref.ref[Any] | None
    step: int
    numbers: Numbers
    rate: float | None
    time: float


class GoodSteps:
    """Takes in good steps, and looks at them soon."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._waiting: list[GoodStep] = []
        self._due = 0.0
        self._has_looked = False  # the first step is: a record shows that a run has begun

    def add(
        self,
        optimizer: Any,
        step: int,
        numbers: Numbers,
        rates: list[dict[str, Any]] | None = None,
    ) -> None:
        """Takes in a step.

        Args:
            optimizer: Whose step it is; None in a script that has none.
            step: Its number.
            numbers: What is known of its numbers.
            rates: The parameter groups it was made with; None for those of the optimizer now.
        """
        live, waiting, rate, known = self._live, self._waiting, None, None
        factor = live.verdicts.policy.lr_factor
        if optimizer is not None:
            known = weakref.ref(optimizer)
            rate = largest_rate(optimizer.param_groups if rates is None else rates)
            if rate is not None:
                rate *= factor
        now = time.time()
        if not waiting and self._has_looked:
            self._due = now + _SOON
        waiting.append(GoodStep(known, step, numbers, rate, now))
        # The next step may depend on this one having been looked at.
        awaited = factor != 1.0 or live.acts_on_spikes
        if awaited or len(waiting) >= _MOST_WAITING or now >= self._due:
            self.look()

    def numbers_at_hand(self) -> Numbers:
        """Returns the numbers of this step; a device is waited for only if somebody asks for all.

        Trackers do: somebody has asked for them.
        """
        live = self._live
        norm = live.grad_norm
        asks = live.tracked is not None and live.tracked.asks_for_all
        if asks and norm is None and live.clipped_norm is not None:
            norm = float(whole(live.clipped_norm))
        if not live.losses or not (asks or live.losses[0].is_cpu):
            return Numbers(None, norm)
        scale = None if live._scaler is None else float(live._scaler.get_scale())
        return Numbers(live.loss_value(), norm, scale)

    def look(self) -> None:
        """Looks at the steps that wait."""
        waiting, self._waiting, self._has_looked = self._waiting, [], True
        live = self._live
        if live.tracked is not None and waiting:
            live.tracked.good(waiting)
        known: weakref.ref[Any] | None = None
        lane: Any = None
        for good in waiting:
            if good.optimizer is not known:
                known = good.optimizer
                optimizer = None if known is None else known()
                lane = None if optimizer is None else live.lane_of(optimizer)
            self._judge(good, lane)

    def _judge(self, good: GoodStep, lane: Any) -> None:
        live, reading = self._live, reading_of(good.numbers)
        if reading is None or not math.isfinite(reading.loss):
            live.verdicts.policy.good()
            return
        live.recent_losses.append(reading.loss)
        if lane is None:
            live.verdicts.policy.good()
            return
        limits = live.verdicts.limits(lane, ahead=0)
        for finding in live.verdicts.passed(lane, reading, limits, good.step):
            live.writer.say(f"step {good.step}: {finding.message} ({finding.name})")


def reading_of(numbers: Numbers) -> Reading | None:
    """Returns the numbers of a good step as a judge takes them; None if there is no loss."""
    loss, norm, scale = numbers
    if loss is None:
        return None
    # Gradients that are scaled are left to the scaler, whether they overflow or not.
    overflow = norm is None or scale is not None
    return Reading(
        closed=False, loss=loss, grad_norm=norm or 0.0, terms={}, scale=scale, overflow=overflow
    )


class Tracked:
    """Writes steps and what was done about them, from the first step on.

    A process that only imports torch, or has a guard of its own, makes no step here, and so
    begins nothing. The record holds what is known without asking a device; trackers, which
    somebody has asked for, get every number.

    Attributes:
        asks_for_all: Whether all numbers of a step are wanted, also those that a device has to be
            asked.
    """

    def __init__(self, live: Live, run_dir: str | None) -> None:
        """Prepares.

        Args:
            live: The guard of the script.
            run_dir: The folder of the run; None for none.
        """
        self._live = live
        self._run_dir = run_dir
        self._trackers: Trackers | None = None
        self._record: RunRecord | None = None
        self.asks_for_all = bool(os.environ.get(TRACK))
        self._wanted = self.asks_for_all or run_dir is not None
        self._begun = False

    def good(self, steps: Sequence[GoodStep]) -> None:
        """Writes steps that were made."""
        if self._wanted:
            self._write([self._line(good) for good in steps])

    def bad(self, optimizer: Any, step: int, symptom: Symptom, decision: Decision) -> None:
        """Writes a step that was not made.

        Args:
            optimizer: Whose step it is; None in a script that has none.
            step: Its number.
            symptom: What is wrong with it.
            decision: What was done about it.
        """
        if not self._wanted:
            return
        action = decision.action.value
        line: dict[str, Any] = {"step": step, "update": step, "time": round(time.time(), 3)}
        if optimizer is not None:
            line["optimizer"] = self._live.place_of(optimizer)
            rate = learning_rate([optimizer])
            # Of a step that the device tells about late, the rate is not known any more.
            if rate is not None and step == self._live.number_of(optimizer):
                line["lr"] = rate * self._live.lr_factor
        line |= {"loss": symptom.loss, "grad_norm": symptom.grad_norm, "terms": symptom.terms}
        self._write([{**line, "action": action}])
        event = Event(symptom.finding(step), decision.action, decision.reason)
        for sink in self._sinks():
            sink.event(event.to_json())
        incident = self._live.writer.folder if self._live.together.mine else None
        if incident is not None and self._trackers is not None:
            self._trackers.event(incident_line(step, incident))

    def close(self) -> None:
        """Writes what is left."""
        for sink in self._sinks():
            sink.close()

    def _sinks(self) -> list[RunRecord | Trackers]:
        return [sink for sink in (self._record, self._trackers) if sink is not None]

    def _line(self, good: GoodStep) -> dict[str, Any]:
        # With "update", as a Guard's own record has it: which tools tell by the count of updates.
        line: dict[str, Any] = {"step": good.step, "update": good.step, "time": round(good.time, 3)}
        if good.optimizer is not None:
            line["optimizer"] = self._live.place_of(good.optimizer())
        if good.rate is not None:
            line["lr"] = good.rate
        line |= good.numbers._asdict()
        line["action"] = "step"
        return line

    def _write(self, lines: list[dict[str, Any]]) -> None:
        if not self._begun:
            self._begin()
        if self._record is not None:
            self._record.metrics(lines)
        if self._trackers is not None:
            for line in lines:
                self._trackers.metric(line)

    def _begin(self) -> None:
        self._begun = True
        # Ranks that were started by the script know of each other by now, and not before.
        self._wanted = self._live.writer.rank == 0
        if not self._wanted:
            return
        self._record = None if self._run_dir is None else self._open(Path(self._run_dir))
        if self.asks_for_all:
            self._trackers = self._begin_tracking()
        self._wanted = bool(self._sinks())

    def _open(self, folder: Path) -> RunRecord | None:
        """Opens the record; in a folder of its own where another process writes meanwhile."""
        say = self._live.writer.say
        for place in (folder, folder / f"process-{os.getpid()}"):
            try:
                return RunRecord(place, on_failure=lambda what: say(f"could not write {what}"))
            except RecordError as error:
                why = error.what
        say(f"no record of the run is kept: {why}")
        return None

    def _begin_tracking(self) -> Trackers | None:
        say = self._live.writer.say
        try:
            return trackers_for(
                None,
                None,
                where=TRACK,
                on_failure=lambda what: say(f"could not write {what}"),
                at_exit=self._live.look,
            )
        except NanguardError as error:
            say(f"the run is not tracked: {error.what} {error.do}")
        return None
