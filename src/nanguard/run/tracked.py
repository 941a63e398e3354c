"""Writes down the steps of a script: in the folder of its run, and for trackers."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanguard.errors import NanguardError, RecordError
from nanguard.guard.optimizers import learning_rate
from nanguard.record import RunRecord
from nanguard.trackers import TRACK, trackers_for
from nanguard.trackers.tracker import incident_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nanguard.guard.policy import Decision
    from nanguard.guard.verdicts import Symptom
    from nanguard.run.good_steps import GoodStep
    from nanguard.run.live import Live
    from nanguard.trackers import Trackers


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
        event = {
            "name": f"non-finite-{symptom.where.replace(' ', '-')}",
            "severity": "error",
            "step": step,
            "message": symptom.in_words(),
            "action": action,
            "reason": decision.reason,
        }
        for sink in self._sinks():
            sink.event(event)
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
