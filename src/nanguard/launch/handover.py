"""From a bad step to an incident: written at once, explained by somebody else."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import platform
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch

import nanguard
from nanguard import incident as incidents
from nanguard.errors import IncidentError
from nanguard.launch import carried

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.guard.policy import Decision
    from nanguard.launch.options import Options
    from nanguard.launch.timeline import Fork, Moment, Timeline
    from nanguard.launch.watch import Watch
    from nanguard.tracer.symptom import Symptom

# How many incidents of one process are explained; what comes after is only recorded.
_EXPLAINED = 3


@dataclass
class BadStep:
    """A step that was not made.

    Attributes:
        symptom: What is wrong with it.
        step: The step as its optimizer counts.
        ordinal: The step as all optimizers together count.
        decision: What the guard does about it.
        skipped: Earlier steps that were not made, either.
        why: Why it cannot be replayed; None if that is to be found out.
        known: What else is known of it, as fields of the incident.
    """

    symptom: Symptom
    step: int
    ordinal: int
    decision: Decision
    skipped: tuple[int, ...]
    why: str | None = None
    known: dict[str, Any] = field(default_factory=dict)


class Handover:
    """Writes incidents and finds someone who explains them."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._explained = 0
        self._ranks_at_first = self.ranks
        self._began = time.monotonic()
        self._base: dict[str, Any] | None = None
        self._folder: Path | None = None

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
    def written(self) -> Path | None:
        """The folder of the last incident; None if it could not be written."""
        return self._folder

    def can_fork(self) -> bool:
        """Returns whether a copy of this process could go on by itself."""
        return sys.platform == "linux" and not _sees_cuda()

    def say(self, text: str) -> None:
        """Tells the user, on the standard error."""
        if not self._options.quiet:
            print(f"nanguard: {text}", file=sys.stderr, flush=True)  # noqa: T201 - the user is here

    def attached(self) -> None:
        """Tells the launcher that there is a process to guard."""
        self._leave_note(f"attached-{os.getpid()}", "")

    def stopped(self, reason: str) -> None:
        """Tells the launcher that the guard ended the run."""
        self.say(f"the run was stopped: {reason}")
        self._leave_note(f"stopped-{os.getpid()}", reason)

    def summary(self, steps: int, bad: int) -> None:
        """Tells what a run has met, on the rank that has reported it."""
        if self._base is not None:
            self.say(f"{steps} steps, {bad} of them bad; incidents in {self._options.incidents}")

    def report(self, bad: BadStep, timeline: Timeline | None, watch: Watch | None) -> None:
        """Writes an incident, and wakes a moment of the past to explain it.

        Args:
            bad: The bad step.
            timeline: The moments of the past, if there are any.
            watch: What knows the models as they were before the step; None if they are not.
        """
        decision = bad.decision
        self.say(
            f"step {bad.step}: {bad.symptom.in_words()} -> {decision.action.value} "
            f"({decision.reason})"
        )
        self._base = self._incident(bad, timeline)
        try:
            self._folder = incidents.new_folder(Path(self._options.incidents), bad.step, self.rank)
            incidents.write(self._folder, self._base)
        except (OSError, IncidentError) as error:
            # The run is worth more than the report about it.
            self._folder = None
            self.say(f"the incident of step {bad.step} could not be written: {error}")
            return
        moment = None
        if timeline is not None and self._may_explain():
            moment = timeline.best(bad.ordinal, patience=self._options.patience)
            if self.ranks > self._ranks_at_first and moment is timeline.first:
                # It would start the other ranks once more.
                moment = None
        if timeline is not None and moment is not None:
            self._wake(timeline, moment, bad, watch)

    def wants_explanation(self) -> bool:
        """Returns whether the last incident is to be explained in the process of the run."""
        return self._folder is not None and self._may_explain()

    def explain_in_place(self, fork: Any, ordinal: int) -> None:
        """Explains the last incident with replays in the process of the run itself."""
        from nanguard.diagnosis.session import explain

        self._explained += 1
        message = {
            "folder": str(self._folder),
            "incident": self._base,
            "target": ordinal,
            "method": "iterator",
            "patience": self._options.patience,
        }
        explain(message, fork)

    @staticmethod
    def serve(message: dict[str, Any], fork: Fork) -> None:
        """Explains an incident; runs in a process that was woken."""
        from nanguard.diagnosis.session import explain

        name = Path(message["folder"]).name
        with _locked(Path(message["control"], f"explaining-{name}")) as file:
            file.write(str(os.getpid()))
            file.flush()
            with contextlib.suppress(OSError):
                Path(message["control"], f"waiting-{name}").unlink()
            if message["method"] == "second-run":
                _import_what_optimizers_need()
            explain(message, fork)

    def _wake(self, timeline: Timeline, moment: Moment, bad: BadStep, watch: Watch | None) -> None:
        assert self._folder is not None  # noqa: S101 - it was just made
        skipped, state = bad.skipped, None
        if self.ranks > 1:
            # By itself a rank cannot make the steps in between: it goes past them.
            skipped = tuple(range(moment.ordinal, bad.ordinal))
            state = str(Path(self._options.control, f"state-{self._folder.name}.pt"))
            if watch is None or not carried.save(watch, Path(state)):
                return
        self._explained += 1
        message = {
            "folder": str(self._folder),
            "incident": self._base,
            "target": bad.ordinal,
            "method": self._method(from_the_start=moment is timeline.first),
            "patience": self._options.patience,
            "control": self._options.control,
            "skipped": skipped,
            "state": state,
        }
        self._leave_note(f"waiting-{self._folder.name}", "")
        if not timeline.wake(moment, message):
            with contextlib.suppress(OSError):
                Path(self._options.control, f"waiting-{self._folder.name}").unlink()

    def _method(self, *, from_the_start: bool) -> str:
        return "second-run" if from_the_start else "snapshot"

    def _may_explain(self) -> bool:
        return self._options.trace and self._explained < _EXPLAINED

    def _incident(self, bad: BadStep, timeline: Timeline | None) -> dict[str, Any]:
        return {
            "schema": incidents.SCHEMA,
            "step": bad.step,
            "rank": self.rank,
            "symptom": bad.symptom.to_json(),
            "action": {"taken": bad.decision.action.value, "reason": bad.decision.reason},
            "run": {
                "command": list(self._options.command),
                "folder": self._options.folder,
                "signature": self._options.signature,
                "ordinal": bad.ordinal,
                "skipped": list(bad.skipped),
                "seconds": round(time.monotonic() - self._began, 3),
                "ranks": self.ranks,
                "python": platform.python_version(),
                "torch": torch.__version__,
                "nanguard": nanguard.__version__,
                "platform": platform.platform(),
                "device": "cuda" if torch.cuda.is_initialized() else "cpu",
            },
            "replay": {
                "verdict": "not-replayed",
                "method": None,
                "why": bad.why or self._why_not(timeline),
            },
            **bad.known,
        }

    def _why_not(self, timeline: Timeline | None) -> str:
        """Returns why a step would not be replayed."""
        if not self._options.trace:
            return "explanations were turned off with --no-trace"
        if self._explained >= _EXPLAINED:
            return f"only the first {_EXPLAINED} incidents of a process are explained"
        if timeline is None:
            return "this process cannot be copied"
        return "no copy of an earlier moment was at hand"

    def _leave_note(self, name: str, text: str) -> None:
        with contextlib.suppress(OSError):
            Path(self._options.control, name).write_text(text)


def _import_what_optimizers_need() -> None:
    """Imports once what every replay from the first line would import, for seconds each time."""
    with contextlib.suppress(Exception):
        importlib.import_module("torch._dynamo")


def _is_together() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _number(variable: str, otherwise: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else otherwise


def _sees_cuda() -> bool:
    """Returns whether there is a CUDA device, without touching it: that would forbid to fork."""
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        return torch.cuda.is_available()
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[IO[str]]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
