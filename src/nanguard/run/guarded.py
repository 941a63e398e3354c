"""Incidents of a ``Guard``: written when it meets a bad step, explained by replaying the step.

The guard decides and keeps the run clean; this is called, and does the rest.
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nanguard import incident as incidents
from nanguard.errors import IncidentError, UsageError
from nanguard.guard import events
from nanguard.guard.journal import WrittenIncident
from nanguard.masking import hidden_words
from nanguard.numerics import all_finite, is_float, local
from nanguard.replay import replay as replays
from nanguard.replay.inplace import InPlace
from nanguard.replay.patches import Patches
from nanguard.replay.starts import Starts
from nanguard.replay.tracer.modules import tensors_in
from nanguard.replay.watch import Made, Watch, is_good
from nanguard.run import live
from nanguard.run.control import Options, from_environment
from nanguard.run.incident_writer import BadStepFacts, IncidentWriter
from nanguard.run.known_faults import DrawnItems, items_drawn
from nanguard.run.run_record import sign
from nanguard.run.together import Together
from nanguard.run_folder import make_private
from nanguard.view.report.words import sentence

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from nanguard.guard.parts import BadStep, Parts
    from nanguard.guard.policy import Trouble
    from nanguard.replay.replay import Replay
    from nanguard.replay.start import Start

# Steps whose starts are kept: the host may be two behind the device.
_KEPT = 4
log = logging.getLogger("nanguard")


def recorder(
    folder: str | Path | None, parts: Parts, *, quarantine: bool = False
) -> Recording | None:
    """Returns who writes the incidents of a guard.

    Args:
        folder: Where they go; None for where ``nanguard run`` puts them.
        parts: The run.
        quarantine: Whether samples that were found bad are left out of the loaders.
    """
    if replays.current is not None:
        # This process is a copy that replays a step of a script with a guard in it.
        return Recording(parts, _options(Path(), control=""), replay=replays.current)
    launched = from_environment()
    if folder is None:
        if launched is not None and quarantine:
            launched = replace(launched, quarantine=True)
        return None if launched is None else Recording(parts, launched)
    made = _made(Path(folder))
    # The launcher waits for explanations by itself.
    control = "" if launched is None else launched.control
    return Recording(parts, _options(made, control=control, quarantine=quarantine))


class Recording:
    """Writes the incidents of one guard, and explains them.

    Attributes:
        replaying: Whether the guard's loop is being replayed right now.
    """

    def __init__(self, parts: Parts, options: Options, *, replay: Replay | None = None) -> None:
        self._parts = parts
        self._replay = replay
        self._pid = os.getpid()
        self._writer = GuardWriter(options, parts)
        self._followed = Followed(parts)
        self._several = Several(parts.optimizers)
        self._held_back: list[int] = []
        self._starts: dict[int, list[Start]] = {}
        self.replaying = False
        if self._writer.quarantine is not None:
            self._followed.left_out = self._writer.quarantine.without_bad
        if replay is None and options.trace:
            self._followed.begin()

    def between(self, step: int) -> None:
        """In a process that replays, keeps count."""
        self._followed.count(step)
        if self._replay is not None and self._replay.ordinal != step:
            # The run was resumed from a checkpoint.
            self._replay.ordinal = step
            self._replay.at_boundary()

    def launched(self, step: int) -> None:
        """Remembers what a step began with, until the host has seen it."""
        starts = self._followed.starts
        starts.step_begins()
        self._starts[step] = starts.step_ended()
        self._starts.pop(step - _KEPT, None)

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
        replay.set_count(one, replay.ordinal)
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

    def with_known(self, trouble: Trouble) -> Trouble:
        """Returns what the ladder has to know, with what the run has met before."""
        if self._replay is not None or self._writer.ranks > 1:
            return trouble  # ranks know of their own samples only, and decide alike
        return self._writer.with_known(trouble, self._drawn(trouble.step))

    def _drawn(self, step: int) -> DrawnItems:
        """Returns the samples of a step."""
        starts = self._followed.starts
        return items_drawn(starts, self._starts.get(step, starts.ended))

    def culprit(self) -> str:
        """Returns what went wrong most often, in a sentence; empty if nothing was explained."""
        return self._writer.known.culprit()

    def bad(self, bad: BadStep) -> WrittenIncident | None:
        """Writes an incident and explains it; returns it."""
        if self._replay is not None or os.getpid() != self._pid:
            return None
        if live.current is not None:
            live.current.heard_of_bad()
        why = _why_not(bad)
        if why is None and Together().in_lockstep:
            why = "a step that lies on several ranks cannot be replayed by one of them"
        step = BadStepFacts(
            bad.symptom, bad.step, bad.step, bad.decision, tuple(self._held_back), why
        )
        step.known = {"guard": {"alone": bad.alone}, "samples": bad_samples(bad.batches)}
        if bad.symptom.limit is not None:
            step.known["guard"]["limit"] = bad.symptom.limit
        step.drawn = self._drawn(bad.step)
        written = self._writer.report(step)
        self._held_back.append(bad.step)
        starts = self._starts.get(bad.step, [])
        if written and why is None and starts and self._writer.may_explain:
            self._explain(bad.step, starts)
        self._writer.tell_trackers(bad.step)
        return self._writer.written(bad.step)

    def judge_again(self, optimizers: Sequence[Optimizer]) -> None:
        """Ends a replay where the guard would have made its step."""
        watcher = self._followed.patches.now
        watcher.step(self._several.as_one(optimizers), lambda: None, None)

    def close(self) -> None:
        """Ends it."""
        if os.getpid() == self._pid:
            self._followed.close()

    def _explain(self, step: int, starts: list[Start]) -> None:
        followed = self._followed
        replayer = InPlace(
            followed,
            followed.patches,
            followed.starts,
            sorted(starts, key=lambda start: all_finite(start.losses)),
            step=step,
            ordinal=step,
        )
        self.replaying = True
        try:
            self._writer.explain(replayer)
        finally:
            self.replaying = False


def _why_not(bad: BadStep) -> str | None:
    """Returns why a step cannot be replayed; None if it can."""
    if bad.symptom.kind == "spike":
        return "a spike is a finite number: there is no bad value to look for"
    if bad.symptom.where not in ("loss", "gradient"):
        return "the state of the run itself is bad, so the step cannot be made again from it"
    return None


class GuardWriter(IncidentWriter):
    """Writes incidents for a guard, which does the talking."""

    def __init__(self, options: Options, parts: Parts) -> None:
        self._parts = parts
        super().__init__(options)

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self._parts.ranks.rank

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return self._parts.ranks.world

    def say(self, text: str) -> None:
        """Leaves it to the guard's own log, which has said as much already."""

    def report(self, bad: BadStepFacts) -> bool:
        """Writes an incident; returns whether that could be done."""
        written = super().report(bad)
        if self.folder is None:
            message = f"the incident of step {bad.step} could not be written to "
            message += self._options.incidents
            self._parts.journal.say(events.RECORD_FAILED(message, step=bad.step))
        return written

    def announce(self, text: str) -> None:
        """Says what the guard's own log does not."""
        log.warning("nanguard: %s", text)

    def tell_trackers(self, step: int) -> None:
        """Lets the trackers know where the incident of a step is."""
        if self.folder is not None:
            self._parts.journal.incident(step, self.folder)

    def written(self, step: int) -> WrittenIncident | None:
        """Returns the incident that was written about a step; None if none was."""
        if self.folder is None:
            return None
        try:
            found = incidents.read(self.folder)
        except IncidentError:
            return None
        said = sentence(found)
        if found.cause is None or not said:
            return WrittenIncident(self.folder)
        return WrittenIncident(self.folder, found.cause["code"], f"step {step}: {said}")


def _options(folder: Path, *, control: str, quarantine: bool = False) -> Options:
    """Returns options for a guard that writes its incidents into a folder of its own."""
    command, here = [*sys.orig_argv], str(Path.cwd())
    return Options(
        incidents=str(folder),
        control=control,
        command=tuple(command),
        folder=here,
        signature=sign(hidden_words(command), here),
        quiet=True,
        quarantine=quarantine,
    )


def _made(folder: Path) -> Path:
    try:
        make_private(folder)
    except OSError as error:
        raise UsageError(
            f"the folder for incidents cannot be made: {error.strerror}.",
            where=f"Guard(incidents={str(folder)!r})",
            do="Give a folder in a place that can be written to.",
        ) from error
    return folder.resolve()


class Followed(Watch):
    """A run that a guard keeps.

    Attributes:
        patches: What makes torch tell what happens.
        starts: What its steps began with.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self._parts = parts
        self.patches = Patches(self)
        self.starts = Starts(models=self.models)
        # Where the script made its optimizers is not known: the guard came later.
        self.made_by = [Made(weakref.ref(optimizer), None) for optimizer in parts.optimizers]
        self._models = parts.models

    def begin(self) -> None:
        """Makes torch tell what happens."""
        self.patches.put_on()
        self.starts.begin()

    def close(self) -> None:
        """Leaves torch as it was found."""
        self.starts.close()
        self.patches.take_off()

    def count(self, step: int) -> None:
        """Notes the number of the step that begins."""
        self.ordinal = step
        for optimizer in self._parts.optimizers:
            self.set_count(optimizer, step)

    def next_batch(self, own: Any, draw: Callable[[Any], Any]) -> Any:
        """Hands on a batch."""
        batch = draw(own)
        self.starts.drew(own, batch, self.indices_of(own))
        return batch

    def made(self, optimizer: Optimizer) -> None:
        """Leaves out other optimizers than the guard's."""

    # In the run itself the guard does all of this.

    def before_backward(self, losses: list[Tensor]) -> None:
        """Ends the start of a pass."""
        self.starts.before_backward(losses)
        self.losses = []
        start = self.starts.current
        if start is not None and losses and losses[0].device.type == "cpu":
            start.bad = not all(map(is_good, losses))

    def after_backward(self) -> None:
        """Notes that the pass is over."""
        self.starts.after_backward()

    def judged_step(self, optimizer: Optimizer, call: Callable[..., Any], closure: Any) -> Any:
        """Makes the step."""
        return call() if closure is None else call(closure)

    def judged_scaler_step(self, scaler: Any, optimizer: Any, call: Callable[[], Any]) -> Any:
        """Makes the step."""
        return call()

    def boundary(self) -> None:
        """Does nothing."""


class Several:
    """Several optimizers that a guard steps as one."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._all = _AsOne(optimizers) if len(optimizers) > 1 else None

    def as_one(self, optimizers: Sequence[Optimizer]) -> Any:
        """Returns the one optimizer, or something that holds what all of them hold."""
        return optimizers[0] if self._all is None or len(optimizers) == 1 else self._all


class _AsOne:
    """What is looked at of an optimizer, for several of them."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = list(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all of them."""
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        """The state of all of them."""
        return {key: value for o in self._optimizers for key, value in o.state.items()}

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Clears the gradients of all of them."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)


def bad_samples(batches: Sequence[tuple[int, Any]]) -> list[int]:
    """Returns which samples of a single batch hold values that are not finite."""
    if len(batches) != 1:
        return []
    rows: set[int] = set()
    sizes: set[int] = set()
    for tensor in tensors_in(batches[0][1]):
        values = local(tensor.detach())
        if not values.dim() or not is_float(values) or values.layout is not torch.strided:
            continue
        sizes.add(values.shape[0])
        bad = ~torch.isfinite(values).reshape(values.shape[0], -1).all(dim=1)
        rows.update(bad.nonzero().flatten().tolist())
    # If every sample is bad, none of them is to blame.
    return sorted(rows) if len(sizes) == 1 and len(rows) < next(iter(sizes)) else []
