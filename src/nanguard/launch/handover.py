"""From a bad step to an incident: written at once, explained by somebody else."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import nanguard
from nanguard import incident as incidents

if TYPE_CHECKING:
    from nanguard.guard.policy import Decision
    from nanguard.launch.options import Options
    from nanguard.launch.timeline import Fork, Timeline
    from nanguard.launch.together import Together
    from nanguard.tracer.symptom import Symptom

# How many incidents of one process are explained; what comes after is only recorded.
_EXPLAINED = 3


class Handover:
    """Writes incidents and finds someone who explains them."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._explained = 0
        self._base: dict[str, Any] | None = None
        self._began = time.monotonic()

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return int(os.environ.get("RANK", "0") or 0)

    def alone(self) -> bool:
        """Returns whether this process trains by itself."""
        return int(os.environ.get("WORLD_SIZE", "1") or 1) == 1

    def can_fork(self) -> bool:
        """Returns whether a copy of this process could go on by itself."""
        return sys.platform == "linux" and not _sees_cuda()

    def say(self, text: str) -> None:
        """Tells the user, on the standard error."""
        if not self._options.quiet:
            print(f"nanguard: {text}", file=sys.stderr, flush=True)  # noqa: T201 - the user is here

    def report(
        self,
        symptom: Symptom,
        *,
        step: int,
        ordinal: int,
        decision: Decision,
        timeline: Timeline | None,
        ranks: Together,
        given: list[tuple[int, Any]],
        skipped: tuple[int, ...],
    ) -> None:
        """Writes an incident, and wakes a moment of the past to explain it."""
        if not ranks.mine:
            return
        folder = incidents.folder_of(Path(self._options.incidents), step, self.rank)
        self.say(
            f"step {step}: {symptom.in_words()} -> {decision.action.value} ({decision.reason})"
        )
        if folder.exists():
            return
        self._base = base = {
            "schema": incidents.SCHEMA,
            "step": step,
            "rank": self.rank,
            "symptom": symptom.to_json(),
            "action": {"taken": decision.action.value, "reason": decision.reason},
            "run": {
                "command": list(self._options.command),
                "folder": str(Path.cwd()),
                "ordinal": ordinal,
                "seconds": round(time.monotonic() - self._began, 3),
                "python": platform.python_version(),
                "torch": torch.__version__,
                "nanguard": nanguard.__version__,
                "platform": platform.platform(),
                "device": "cuda" if torch.cuda.is_initialized() else "cpu",
                "skipped": list(skipped),
                "ranks": int(os.environ.get("WORLD_SIZE", "1") or 1),
            },
            "replay": {"verdict": "not-replayed", "method": None},
        }
        incidents.write(folder, base)
        self._explain(folder, base, symptom, ordinal, timeline, given, skipped)

    def _explain(
        self,
        folder: Path,
        base: dict[str, Any],
        symptom: Symptom,
        ordinal: int,
        timeline: Timeline | None,
        given: list[tuple[int, Any]],
        skipped: tuple[int, ...],
    ) -> None:
        if not self._options.trace or self._explained >= _EXPLAINED or timeline is None:
            return
        moment = timeline.best(ordinal, patience=self._options.patience)
        if moment is None:
            return
        self._explained += 1
        method = "second-run" if moment is timeline.first else "snapshot"
        message = {
            "folder": str(folder),
            "incident": base,
            "symptom": symptom,
            "target": ordinal,
            "method": method,
            "patience": self._options.patience,
            "control": self._options.control,
            "batches": [batch for at, batch in given if at >= moment.ordinal],
            "skipped": skipped,
        }
        if timeline.wake(moment, message):
            Path(self._options.control, f"waiting-{folder.name}").touch()

    @staticmethod
    def serve(message: dict[str, Any], fork: Fork) -> None:
        """Explains an incident; runs in a process that was woken."""
        from nanguard.diagnosis.session import explain

        path = Path(message["control"], f"explaining-{Path(message['folder']).name}")
        with _lock(path) as file:
            file.write(str(os.getpid()))
            file.flush()
            with contextlib.suppress(OSError):
                Path(message["control"], f"waiting-{Path(message['folder']).name}").unlink()
            explain(message, fork)

    def wants_explanation(self, step: int) -> bool:
        """Returns whether an incident is to be explained in the process of the run."""
        known = self._base is not None and self._base["step"] == step
        return self._options.trace and known and self._explained < _EXPLAINED

    def explain_in_place(self, fork: Any, symptom: Symptom, step: int, ordinal: int) -> None:
        """Explains the last incident with replays in the process of the run itself."""
        from nanguard.diagnosis.session import explain

        self._explained += 1
        folder = incidents.folder_of(Path(self._options.incidents), step, self.rank)
        message = {
            "folder": str(folder),
            "incident": self._base,
            "symptom": symptom,
            "target": ordinal,
            "method": "iterator",
            "patience": self._options.patience,
        }
        explain(message, fork)

    def attached(self) -> None:
        """Tells the launcher that there is a process to guard."""
        with contextlib.suppress(OSError):
            Path(self._options.control, f"attached-{os.getpid()}").touch()

    def stopped(self, reason: str) -> None:
        """Tells the launcher that the guard ended the run."""
        self.say(f"the run was stopped: {reason}")
        with contextlib.suppress(OSError):
            Path(self._options.control, f"stopped-{os.getpid()}").write_text(reason)

    def summary(self, steps: int, bad: int) -> None:
        """Tells what a run has met, on the rank that has reported it."""
        if self._base is None:
            return
        self.say(f"{steps} steps, {bad} of them bad; incidents in {self._options.incidents}")


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
def _lock(path: Path) -> Any:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
