"""What is done in a second run of a command, for an incident of the first.

The process waits right after torch was imported, and forks for each thing that is tried. Each copy
runs the script from there, up to the step in question, with something changed, and ends with the
answer. So nothing has to be put back, and what only the steps before can show can be tried: another
learning rate, other initial values, gradients that are cleared.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import shutil
import signal
import tempfile
import warnings
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanguard import incident as incidents
from nanguard.findings import number
from nanguard.replay.replay import ForkedReplay
from nanguard.replay.sandbox import OpenFiles, everywhere
from nanguard.replay.task import ReplayProgress, Task

if TYPE_CHECKING:
    from nanguard.replay.task import ReplayOutcome
    from nanguard.run.control import Options
    from nanguard.run.live import Live


def become_replay(live: Live, options: Options) -> None:
    """Serves, and returns in a copy of this process that is to go on with the script.

    Args:
        live: What knows the run.
        options: What the second run is for.
    """
    # A fork beside threads is what copies are; they have a time limit.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    OpenFiles([]).detach()
    outside = everywhere()
    assert outside is not None  # noqa: S101 - it was there before the script's first line
    # From here on until a copy is made, it is us who write: the incident, for example.
    outside.allowed = True
    task: Any = None
    try:
        _import_what_optimizers_need()
        again = options.again or {}
        progress = ReplayProgress(Path(again["progress"])) if "progress" in again else None
        _serve({**again, "patience": options.patience}, Fork(progress))
    except _ReplayError as replay:
        task = replay.task
    finally:
        if task is None:
            os._exit(0)
    follower = ForkedReplay(task, live)
    follower.left_out = live.left_out
    live.patches.watcher = follower
    follower.begin()


def _import_what_optimizers_need() -> None:
    """Imports once what every replay from the first line would import, for seconds each time."""
    with contextlib.suppress(Exception):
        importlib.import_module("torch._dynamo")


def _serve(message: dict[str, Any], fork: Fork) -> None:
    """Explains an incident, or replays its step once and writes the answer to a file."""
    incident = incidents.read(Path(message["folder"]))
    run = incident["run"]
    skipped = tuple(run.get("skipped", ()))
    if message["mode"] == "explain":
        from nanguard.diagnose.session import explain

        message = {
            "folder": message["folder"],
            "incident": incident,
            "target": run["ordinal"],
            "method": "second-run",
            "control": message.get("control"),
            "skipped": skipped,
        }
        explain(message, fork)
        return
    task = Task(
        run["ordinal"],
        trace=True,
        table=bool(message.get("table")),
        precision=message.get("precision"),
        without=tuple(message.get("without", ())),
        skipped=skipped,
    )
    outcome = fork.run(task, message["patience"])
    Path(message["answer"]).write_text(json.dumps(_told(outcome)), encoding="utf-8")


def _told(outcome: ReplayOutcome | None) -> dict[str, Any]:
    """Returns an outcome as JSON holds it."""
    if outcome is None:
        return {"error": "the replay did not come to the step in time"}
    if outcome.error is not None:
        return {"error": outcome.error}
    origin, site = outcome.origin, outcome.origin.site if outcome.origin else None
    return {
        "finite": outcome.finite,
        "step": outcome.step,
        "loss": None if outcome.loss is None else number(outcome.loss),
        "symptom": None if outcome.symptom is None else outcome.symptom.to_json(),
        "said": None if outcome.symptom is None else outcome.symptom.in_words(),
        "origin": None
        if origin is None
        else {
            "phase": origin.phase,
            "op": origin.op,
            "module": origin.module,
            "file": site.file if site else None,
            "line": site.line if site else None,
        },
        "samples": outcome.facts.samples,
        "operations": [
            {**row, "min": _number(row["min"]), "max": _number(row["max"])}
            for row in outcome.facts.table
        ],
    }


def _number(value: Any) -> Any:
    return number(value) if isinstance(value, (int, float)) else None


class _ReplayError(BaseException):
    """Carries a task up to where the process was forked, in a process that is to go on there."""

    def __init__(self, task: Any) -> None:
        super().__init__()
        self.task = task


class Fork:
    """Starts copies of this process, each of which runs the script from here."""

    wants_history = False

    def __init__(self, progress: ReplayProgress | None = None) -> None:
        """Begins with no copies.

        Args:
            progress: Where they note how far they are; None for nowhere.
        """
        self._progress = progress

    def run(self, task: Any, seconds: float) -> Any:
        """Lets a copy of this process go on with a task; returns what it answers.

        Returns None if it does not answer in time, or ends without an answer.
        """
        reader, writer = os.pipe()
        if self._progress is not None:
            self._progress.begin_replay()
        folder = tempfile.mkdtemp(prefix="nanguard-replay-")
        pid = _fork()
        if pid == 0:
            os.close(reader)
            task.answer = Connection(writer, readable=False)
            task.progress = self._progress
            outside = everywhere()
            if outside is not None:
                outside.go_on_in(Path(folder))
            raise _ReplayError(task)
        os.close(writer)
        line = Connection(reader, writable=False)
        answer: Any = None
        try:
            if wait([line], seconds):
                answer = line.recv()
        except (EOFError, OSError):
            answer = None
        finally:
            line.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
            shutil.rmtree(folder, ignore_errors=True)
        return answer


def _fork() -> int:
    # Python gives every forked process another seed, and a copy must not have one.
    state = random.getstate()
    with warnings.catch_warnings():
        # Threads do not survive a fork, which is known here; a copy has a time limit.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        random.setstate(state)
    return pid
