"""From a bad step to an incident: written at once, explained by replays, and printed."""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import time
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import nanguard
from nanguard import incident as incidents
from nanguard.errors import IncidentError
from nanguard.incident import Incident
from nanguard.run.control import ATTACHED, STEPPED, STOPPED, leave
from nanguard.run.known_faults import (
    QUARANTINE,
    DrawnItems,
    Fault,
    Item,
    KnownFaults,
    Quarantine,
    discard,
)
from nanguard.run.waiting import SignOfLife, tell_user
from nanguard.view.report.words import in_a_line, is_fixable

if TYPE_CHECKING:
    from nanguard.diagnose.lab import Replayer
    from nanguard.guard.policy import Decision, Trouble
    from nanguard.guard.verdicts import Symptom
    from nanguard.run.control import Options

# How many faults of one process are explained; what comes after is only recorded.
_EXPLAINED = 3
# How many later steps are looked at to see whether their fault is a known one.
_RECOGNISED = 32
# Seconds that an explanation may hold up a run before it says that it does.
_WITHOUT_A_WORD = 10


@dataclass
class BadStepFacts:
    """A step that was not made.

    Attributes:
        symptom: What is wrong with it.
        step: The step as its optimizer counts.
        ordinal: The step as all optimizers together count.
        decision: What the guard does about it.
        skipped: Earlier steps that were not made, either.
        why: Why it cannot be replayed; None if that is to be found out.
        known: What else is known of it, as fields of the incident.
        seconds: How long a step of this run usually takes; None if that is not known.
        drawn: The samples that loaders have handed out for it.
    """

    symptom: Symptom
    step: int
    ordinal: int
    decision: Decision
    skipped: tuple[int, ...]
    why: str | None = None
    known: dict[str, Any] = field(default_factory=dict)
    seconds: float | None = None
    drawn: DrawnItems = field(default_factory=DrawnItems)


class IncidentWriter:
    """Writes incidents of one process, and has them explained.

    Attributes:
        folder: The folder of the last incident; None if it could not be written.
        known: What the run has met so far.
        quarantine: The samples that loaders leave out; None if they leave out none.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._explained = 0
        self._began = time.monotonic()
        self._recognised = self._looked_at_samples = 0
        self._incident: Incident | None = None
        self._bad: BadStepFacts | None = None
        self.folder: Path | None = None
        self.known = KnownFaults(self.announce)
        self.quarantine: Quarantine | None = None
        if options.quarantine:
            several = self.ranks > 1
            left_out = None if options.left_out is None else [Item(*i) for i in options.left_out]
            folder = Path(options.folder)
            self.quarantine = Quarantine(folder, several_ranks=several, known=left_out)

    @property
    def rank(self) -> int:
        """The rank of this process, as far as it is known by now."""
        if _is_together():
            return torch.distributed.get_rank()
        # Launchers that start ranks by themselves may name the local one only.
        return _number("RANK", _number("LOCAL_RANK", 0) + _number("NODE_RANK", 0))

    @property
    def ranks(self) -> int:
        """How many ranks there are, as far as it is known by now."""
        return torch.distributed.get_world_size() if _is_together() else _number("WORLD_SIZE", 1)

    @property
    def may_explain(self) -> bool:
        """Whether the next incident is to be explained."""
        more = self._recognised < _RECOGNISED + _EXPLAINED
        return self._options.trace and more and (self._may_find_causes or len(self.known) > 0)

    @property
    def _may_find_causes(self) -> bool:
        return self._explained < _EXPLAINED

    def with_known(self, trouble: Trouble, drawn: DrawnItems) -> Trouble:
        """Returns what the ladder has to know, with what the run has met before.

        Args:
            trouble: What is wrong with a step.
            drawn: The samples of the step.
        """
        items = sorted({item.index for item in self.known.bad_items(drawn)})
        listed = ", ".join(map(str, items))
        why = f"dataset item {listed} is known to be bad" if items else ""
        return replace(trouble, known=why, rate_matters=self.known.lower_rate_helps)

    def say(self, text: str) -> None:
        """Writes a line to the user, on the standard error."""
        if not self._options.quiet:
            tell_user(f"nanguard: {text}")

    def announce(self, text: str) -> None:
        """Writes a line that a log of ours would not hold."""
        self.say(text)

    def attached(self) -> None:
        """Lets the launcher know that there is a process to guard."""
        self._leave_note(ATTACHED)

    def stepped(self) -> None:
        """Lets the launcher know that a step was seen."""
        self._leave_note(STEPPED)

    def stopped(self, reason: str) -> None:
        """Lets the launcher know that the guard ended the run."""
        culprit = self.known.culprit()
        self.say(f"the run was stopped: {reason}{': ' if culprit else ''}{culprit}")
        self._leave_note(STOPPED, reason)

    def summary(self, steps: int, bad: int) -> None:
        """Says what a run has met, on the rank that has reported it; nothing, on the first."""
        if not bad and self.rank == 0 and steps and self._options.run_dir is not None:
            self.say(f"{steps:,} step{'' if steps == 1 else 's'} guarded, none bad")
        elif bad and self._incident is not None:
            self.say(f"{steps} steps, {bad} of them bad; incidents in {self._options.incidents}")

    def report(self, bad: BadStepFacts) -> bool:
        """Writes an incident; returns whether that could be done."""
        known = self.known.bad_items(bad.drawn)
        if not known:
            self._tell_symptom(bad)
        self._incident, self._bad = self._new(bad), bad
        try:
            self.folder = incidents.new_folder(Path(self._options.incidents), bad.step, self.rank)
            incidents.write(self.folder, self._incident)
        except (OSError, IncidentError) as error:
            # The run is worth more than the report about it.
            self.folder = None
            self.say(f"the incident of step {bad.step} could not be written: {error}")
        sure = self._looked_at_samples >= _RECOGNISED or not self.may_explain
        if known and self.folder is not None and sure:
            # That it is these samples again is all that is known of it.
            self._count(self.known.fault_of(known), self._incident)
            return False
        return self.folder is not None

    def _tell_symptom(self, bad: BadStepFacts) -> None:
        action, reason = bad.decision.action.value, bad.decision.reason
        self.say(f"step {bad.step}: {bad.symptom.in_words()} -> {action} ({reason})")

    def explain(self, replayer: Replayer) -> None:
        """Explains the last incident with replays in the process of the run itself."""
        from nanguard.diagnose.session import explain

        if self.folder is None or self._incident is None or self._bad is None:
            return
        message: dict[str, Any] = {
            "folder": str(self.folder),
            "incident": self._incident,
            "target": self._incident.run["ordinal"],
            "method": "in-place",
            "known": self.known.traced,
            "only_known": not self._may_find_causes,
        }
        sign_of_life = SignOfLife(quiet=self._options.quiet, after=_WITHOUT_A_WORD)
        text, count = f"explaining step {self._bad.step}", itertools.count(1)
        message["note"] = lambda _seconds: sign_of_life.show(text, f"replay {next(count)}")
        try:
            explain(message, replayer)
        except KeyboardInterrupt:
            self._explained += 1
            self._incident.replay["why"] = "the explanation was interrupted"
            with contextlib.suppress(OSError):
                incidents.write(self.folder, self._incident)
            raise
        except Exception as error:  # noqa: BLE001 - the run is worth more than an explanation
            self._explained += 1
            self.say(f"the incident could not be explained: {error!r}")
            return
        finally:
            sign_of_life.end("the explanation ended")
        by_sample = bool(self.known.bad_items(self._bad.drawn))
        if by_sample:
            self._looked_at_samples += 1
        else:
            self._recognised += 1
        if message["same_as"] is not None:
            self._count(self.known[message["same_as"]], message["found"])
            return
        if by_sample:
            self._tell_symptom(self._bad)  # it is not the known samples, after all
        if "found" in message:
            return
        self._explained += 1
        self.tell(self.folder)
        self._remember(message["traced"])

    def _count(self, fault: Fault | None, found: Incident) -> None:
        """Counts a step as another one of a known fault; its own folder goes."""
        if fault is None or self.folder is None or self._bad is None:
            return
        folder, self.folder = self.folder, fault.folder
        self.known.count(fault, self._bad.step, found, self._bad.drawn)
        discard(folder)
        self._leave_out(fault)

    def _remember(self, traced: tuple[Any, ...] | None) -> None:
        """Remembers what was explained, so that the same is known when it comes again."""
        if self.folder is None or self._bad is None:
            return
        try:
            found = incidents.read(self.folder)
        except IncidentError:
            return
        code = "None" if found.cause is None else str(found.cause.get("code"))
        fault = Fault(self.folder, self._bad.step, traced, code)
        other_each_time = self.known.add(fault, self._bad.drawn, found)
        if other_each_time:
            said = _other_each_time(other_each_time)
            found.notes = [*found.notes, said]
            with contextlib.suppress(OSError, IncidentError):
                incidents.write(self.folder, found)
            if self.quarantine is not None:
                self.announce(said)
        self._leave_out(fault)

    def _leave_out(self, fault: Fault) -> None:
        new = [] if self.quarantine is None else self.quarantine.add(fault)
        if new:
            listed = ", ".join(str(item.index) for item in new)
            many = "s" if len(new) > 1 else ""
            self.announce(
                f"dataset item{many} {listed} will be left out from now on ({QUARANTINE})"
            )

    def did_not_come_again(self, folder: Path) -> None:
        """Completes an incident whose step was finite when exactly the same was done again."""
        try:
            found = incidents.read(folder)
        except IncidentError:
            return
        found.cause = {
            "code": "hardware-or-nondeterminism",
            "summary": "the step is finite when it is made again, while a good step came out bit "
            "for bit: hardware, timing, or a counter that the step depends on",
            "confidence": 0.4,
        }
        found.replay = {**found.replay, "verdict": "not-reproduced"}
        incidents.write(folder, found)
        self.tell(folder)

    def tell(self, folder: Path) -> None:
        """Says what was found out about an incident."""
        try:
            found = incidents.read(folder)
        except IncidentError:
            return
        line = in_a_line(found)
        if line is not None:
            fix = f"\n          nanguard fix {_short(folder)}" if is_fixable(found) else ""
            self.announce(f"{line}\n          nanguard explain {_short(folder)}{fix}")

    def _new(self, bad: BadStepFacts) -> Incident:
        left_out = sorted(self.quarantine.left_out) if self.quarantine is not None else []
        incident = Incident()
        incident.step, incident.rank = bad.step, self.rank
        incident.symptom = bad.symptom.to_json()
        incident.action = {"taken": bad.decision.action.value, "reason": bad.decision.reason}
        incident.run = {
            "command": list(self._options.command),
            "folder": self._options.folder,
            "signature": self._options.signature,
            "ordinal": bad.ordinal,
            "skipped": list(bad.skipped),
            "seconds": round(time.monotonic() - self._began, 3),
            "step_seconds": None if bad.seconds is None else round(bad.seconds, 6),
            "ranks": self.ranks,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "nanguard": nanguard.__version__,
            "platform": platform.platform(),
            "device": "cuda" if torch.cuda.is_initialized() else "cpu",
        }
        if left_out:
            incident.run["left_out"] = [astuple(item) for item in left_out]
        incident.replay = {
            "verdict": "not-replayed",
            "method": None,
            "why": bad.why or self._why_not(),
        }
        incident.put(bad.known)
        return incident

    def _why_not(self) -> str:
        """Returns why a step would not be replayed."""
        if not self._options.trace:
            return "explanations were turned off with --no-trace"
        if self._explained >= _EXPLAINED:
            return f"only the first {_EXPLAINED} faults of a process are explained"
        return "what the step began with was not recorded"

    def _leave_note(self, name: str, text: str = "") -> None:
        leave(Path(self._options.control), f"{name}{os.getpid()}", text)


def _other_each_time(items: list[Item]) -> str:
    many = len(items) > 1
    listed = ", ".join(str(item.index) for item in items)
    return (
        f"dataset item{'s' if many else ''} {listed} {'were' if many else 'was'} bad this time, "
        "and different when read again, as with random augmentation: not known to be bad, and not "
        "left out"
    )


def _is_together() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _number(variable: str, otherwise: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else otherwise


def _short(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
