"""Incidents of a ``Guard``: written when it meets a bad step, explained by replaying the step.

The guard decides and keeps the run clean; this is told, and does the rest. A copy of the process
that waits at an earlier moment goes on from there with the guard in it, up to the bad step. Where
a process cannot be copied (CUDA), the guard gives the bad batches out again in the run itself.
"""

from __future__ import annotations

import dataclasses as dc
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nanguard import incident as incidents
from nanguard.errors import IncidentError, UsageError
from nanguard.guard import events
from nanguard.guard.policy import Action
from nanguard.launch import changes, live
from nanguard.launch import replay as replays
from nanguard.launch.following import Followed, Several, bad_samples
from nanguard.launch.handover import BadStep, Handover
from nanguard.launch.inplace import Flight, InPlace
from nanguard.launch.options import Options, from_environment
from nanguard.launch.patches import Patches
from nanguard.launch.replay import ForkedReplay
from nanguard.launch.timeline import Timeline
from nanguard.launch.trust import sign
from nanguard.launch.waiting import wait_for_explanations
from nanguard.tracer.symptom import Symptom

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.optim import Optimizer

    from nanguard.guard.parts import Parts
    from nanguard.guard.recorder import BadStep as Told
    from nanguard.launch.replay import Replay

log = logging.getLogger("nanguard")


def recorder(folder: str | Path | None, parts: Parts) -> Recording | None:
    """Returns who writes the incidents of a guard.

    Args:
        folder: Where they go; None for where ``nanguard run`` puts them.
        parts: The run.
    """
    if replays.current is not None:
        # This process is a copy that replays a step of a script with a guard in it.
        return Recording(parts, _options(Path(), control=""), replay=replays.current)
    launched = from_environment()
    if folder is None:
        return None if launched is None else Recording(parts, launched)
    made = _made(Path(folder))
    # The launcher waits for explanations by itself.
    control = "" if launched is None else launched.control
    return Recording(parts, _options(made, control=control))


class Recording:
    """Writes the incidents of one guard, and lets them be explained."""

    def __init__(self, parts: Parts, options: Options, *, replay: Replay | None = None) -> None:
        self._own_control = not options.control and replay is None
        if self._own_control:
            options = dc.replace(options, control=tempfile.mkdtemp(prefix="nanguard-guard-"))
        self._parts = parts
        self._options = options
        self._replay = replay
        self._pid = os.getpid()
        self._handover = GuardHandover(options, parts)
        self._followed = Followed(parts, self._handover)
        self._several = Several(parts.optimizers)
        self._held_back: list[int] = []
        self._in_place: InPlace | None = None
        self._turns: list[int] = []
        self._timeline: Timeline | None = None
        self._begun = False
        if replay is None and options.trace and self._handover.can_fork():
            self._timeline = Timeline(self._handover.serve)

    def between(self, step: int) -> None:
        """Takes a moment now and then; in a process that replays, keeps count."""
        self._followed.count(step)
        if self._replay is not None:
            if self._replay.ordinal != step:
                # The run was resumed from a checkpoint.
                self._replay.ordinal = step
                self._replay.at_boundary()
            return
        if self._timeline is None or os.getpid() != self._pid or self._followed.is_shared(step):
            return
        first, self._begun = not self._begun, True
        task = self._timeline.take_first() if first else self._timeline.take_if_due(step)
        if task is not None:
            self._become(ForkedReplay(task, self._followed))

    def verdict(self, step: int) -> bool | None:
        """Returns whether a step is held back, where it is replayed."""
        replay = self._replay
        return None if replay is None else step in replay.task.skipped

    def apply(self, optimizers: Sequence[Optimizer], call: Callable[[], None]) -> None:
        """Makes a good step; where it is replayed, it is judged there."""
        replay = self._replay
        if replay is None:
            call()
            return
        one = self._several.as_one(optimizers)
        replay.counts[one] = replay.ordinal
        scaler = self._parts.scaling.scaler
        if scaler is None:
            replay.step(one, call, None)
        else:
            replay.scaler_step(scaler, one, call)

    def held_back(self, optimizers: Sequence[Optimizer]) -> None:
        """Counts a step that was not made, where it is replayed and where it was tried."""
        if self._replay is not None:
            self._replay.end_step(self._several.as_one(optimizers))
        elif live.current is not None:
            live.current.heard_of_held_back(optimizers)

    def bad(self, bad: Told) -> None:
        """Writes an incident and has it explained."""
        if self._replay is not None or os.getpid() != self._pid:
            return
        if live.current is not None:
            live.current.heard_of_bad()
        why = self._why_not(bad)
        seen = bad.symptoms
        symptom = Symptom(
            seen.where, seen.kind, seen.loss, seen.grad_norm, seen.terms, seen.names, seen.scale
        )
        clean = seen.where in ("loss", "gradient")
        step = BadStep(symptom, bad.step, bad.step, bad.decision, tuple(self._held_back), why)
        step.known = {"guard": {"alone": bad.alone}, "samples": bad_samples(bad.batches)}
        if seen.limit is not None:
            step.known["guard"]["limit"] = seen.limit
        timeline = self._timeline if why is None else None
        self._handover.report(step, timeline, self._followed if clean else None)
        self._held_back.append(bad.step)
        if why is None and timeline is None and self._handover.wants_explanation():
            self._begin_in_place(bad)

    def again(self) -> tuple[int, Any] | None:
        """Returns a batch that is to be given out for a replay, with its index."""
        if self._in_place is None:
            return None
        given = self._in_place.next_batch()
        if given is None:
            self.leave()
            return None
        return self._turns[-1 - self._in_place.left], given[0]

    def judge_again(self, optimizers: Sequence[Optimizer]) -> bool:
        """Looks at a step that is replayed in the run itself; returns whether it is one."""
        if self._in_place is None:
            return False
        watcher = self._followed.patches.watcher
        watcher.step(self._several.as_one(optimizers), lambda: None, None)
        return True

    def leave(self) -> None:
        """Ends replays in the run itself."""
        if self._in_place is not None:
            self._in_place.end()
            self._in_place = None
            self._followed.end_replays()

    def close(self) -> None:
        """Waits for explanations, and says what they found."""
        if self._replay is not None or os.getpid() != self._pid:
            return
        self.leave()
        if self._timeline is not None:
            self._timeline.close()
        if self._own_control:
            wait_for_explanations(Path(self._options.control), self._options.patience * 1.5)
            shutil.rmtree(self._options.control, ignore_errors=True)
            self._handover.tell()

    def _become(self, replay: ForkedReplay) -> None:
        """Goes on as a replay; this process was forked for it."""
        self._replay = replay
        self._timeline = None
        Patches(replay).put_on()
        changes.refuse_workers(replay.refuse)
        replay.begin()
        replay.follow_loaders()

    def _why_not(self, bad: Told) -> str | None:
        """Returns why a step cannot be replayed; None if it can."""
        if bad.symptoms.kind == "spike":
            return "a spike is a finite number: there is no bad value to look for"
        if bad.searched:
            return "the optimizer evaluates the loss itself, several times a step"
        if self._timeline is not None or not self._options.trace:
            return None
        if self._parts.ranks.world > 1:
            return "one of several ranks cannot replay a step in the run itself"
        if not bad.watched or not bad.batches:
            return "the guard does not give out the batches, so it cannot give them out again"
        if bad.decision.action is Action.STOP:
            return "the run was stopped, and this device needs its loop for a replay"
        return None

    def _begin_in_place(self, bad: Told) -> None:
        drawn: list[Any] = [(None, batch) for _, batch in bad.batches]
        self._turns = [index for index, _ in bad.batches]
        self._followed.begin_replays(bad.step)
        flight = Flight(None, self._parts.optimizers[0], bad.step, bad.step, drawn, bad.streams)
        self._in_place = InPlace(self._followed, flight, self._parts.streams)


class GuardHandover(Handover):
    """Writes incidents for a guard, which does the talking."""

    def __init__(self, options: Options, parts: Parts) -> None:
        self._parts = parts
        super().__init__(options)
        self._written: list[Path] = []

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self._parts.ranks.rank

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return self._parts.ranks.world

    def can_fork(self) -> bool:
        """Returns whether a copy of this process could go on by itself."""
        on_cpu = all(device.type == "cpu" for device in self._parts.devices)
        return sys.platform == "linux" and on_cpu and not torch.cuda.is_initialized()

    def say(self, text: str) -> None:
        """Leaves it to the guard's own log, which has said as much already."""

    def report(self, bad: BadStep, timeline: Any, watch: Any) -> None:
        """Writes an incident, and wakes a moment of the past to explain it."""
        super().report(bad, timeline, watch)
        if self._folder is not None:
            self._written.append(self._folder)
            self._parts.journal.incident(bad.step, self._folder)
            return
        message = f"the incident of step {bad.step} could not be written to "
        message += self._options.incidents
        self._parts.journal.say(events.RECORD_FAILED(message, step=bad.step))

    def _method(self, *, from_the_start: bool) -> str:
        # The first moment is the one at which the guard was made.
        return "snapshot"

    def tell(self) -> None:
        """Says what was found out about each incident."""
        for folder in self._written:
            try:
                found = incidents.read(folder)
            except IncidentError:
                continue
            cause, origin = found.get("cause") or {}, found.get("origin") or {}
            if cause:
                place = ""
                if origin.get("line"):
                    place = f" at {Path(str(origin['file'])).name}:{origin['line']}"
                log.warning(
                    "step %s: %s%s: %s (nanguard explain %s)",
                    found["step"],
                    cause.get("code"),
                    place,
                    cause.get("summary"),
                    folder,
                )


def _options(folder: Path, *, control: str) -> Options:
    """Returns options for a guard that writes its incidents into a folder of its own."""
    command, here = [*sys.orig_argv], str(Path.cwd())
    return Options(
        incidents=str(folder),
        control=control,
        command=tuple(command),
        folder=here,
        signature=sign(command, here),
        quiet=True,
    )


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"the folder for incidents cannot be made: {error.strerror}.",
            where=f"Guard(incidents={str(folder)!r})",
            do="Give a folder in a place that can be written to.",
        ) from error
    return folder.resolve()
