"""How an attempt ended, as far as its processes have left word."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from nanguard.run.control import BAD, ENDED, INTERRUPTED, RAISED, RATE, STEPS, STOPPED
from nanguard.run.heartbeat import Steps, read_bad, read_steps

_WORDS = re.compile(
    r"(?<![a-z])(?:nans?|infs?|infinit[ey]|non[-_ ]?finite|(?:is|are|not)[-_ ]?finite|is_?nan"
    r"|is_?inf|diverged|exploded|floatingpointerror|nonfiniteerror)(?![a-z])",
    re.IGNORECASE,
)
# What a rank says when another one is gone.
_LOST = re.compile(
    r"connection (?:closed|reset|refused)|closed by peer|nccl|broken pipe|gloo|peer is gone"
    r"|process ?group.*(?:timed out|timeout)",
    re.IGNORECASE,
)
_WANTED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# What a shell adds to the number of a signal that ended a command.
_BY_SIGNAL = 128
_LONGEST = 1 << 16
# Bad steps that are no further apart than this are one trouble.
_APART = 20
# Good steps that do not speak for what an attempt has begun with.
_FEW = 3
# Bad steps that are not the fault of one batch.
_MANY = 3


class RunEnding(str, Enum):
    """What became of an attempt."""

    DONE = "done"
    INTERRUPTED = "interrupted"
    STOPPED = "stopped"  # by the guard
    NON_FINITE = "non-finite"  # it gave up by itself over its numbers
    KILLED = "killed"  # without a word: a signal, no memory left
    FAILED = "failed"
    NOT_BEGUN = "not-begun"  # it failed before its first step


@dataclass(frozen=True, slots=True)
class Ending:
    """How an attempt ended.

    Attributes:
        outcome: What became of it.
        code: The exit code.
        reason: Why, in words.
        steps: What is known of its steps; None if it tried none.
        tried: How many steps it has tried, the last one included that was not made.
        raised: The exception that ended it: type, file and line; empty if none did.
        incidents: The folders of its incidents.
        bad: The steps that were bad, in their order, counted from 0 like those it has tried.
        rate: The learning rate of its first step; None if it is not known.
    """

    outcome: RunEnding
    code: int
    reason: str
    steps: Steps | None = None
    tried: int = 0
    raised: str = ""
    incidents: tuple[Path, ...] = ()
    bad: tuple[int, ...] = ()
    rate: float | None = None

    @property
    def over_numbers(self) -> bool:
        """Whether numbers that are not finite ended it."""
        return self.outcome in (RunEnding.STOPPED, RunEnding.NON_FINITE)

    @property
    def bad_since(self) -> int:
        """The step with which the trouble began that ended it: what was saved after it is bad."""
        since = max(0, self.tried - 1)
        for step in reversed(self.bad):
            if step < since - _APART:
                break
            since = min(since, step)
        return since

    @property
    def hopeless(self) -> bool:
        """Whether it met hardly anything but bad steps: what it began with is no good state."""
        return self.over_numbers and self.bad_since <= _FEW and len(self.bad) >= _MANY


def read_ending(control: Path, code: int, incidents: tuple[Path, ...]) -> Ending:
    """Returns how an attempt ended.

    Args:
        control: The folder in which its processes have left word.
        code: The exit code of ``nanguard run``.
        incidents: The folders of its incidents.
    """
    every = [steps for path in control.glob(f"{STEPS}*") if (steps := read_steps(path))]
    steps = max(every, key=lambda one: one.count, default=None)
    raised = _most_telling([_notes(path) for path in sorted(control.glob(f"{RAISED}*"))])
    ended = [_notes(path) for path in control.glob(f"{ENDED}*")]
    stopped = [_text(path) for path in control.glob(f"{STOPPED}*")]
    outcome, reason = _judged(
        control, code, stopped, raised, all(note.get("finite", True) for note in ended), steps
    )
    tried = 0 if steps is None else steps.count
    # Of several ranks, the one that has met a bad step may be the only one to tell.
    bad = sorted({step for path in control.glob(f"{BAD}*") for step in read_bad(path)})
    if outcome is RunEnding.STOPPED and bad:
        tried = max(tried, bad[-1] + 1)
    elif outcome in (RunEnding.STOPPED, RunEnding.NON_FINITE):
        tried += 1
    place = f"{raised['type']} {raised['file']}:{raised['line']}" if raised else ""
    rates = [_notes(path).get("lr") for path in control.glob(f"{RATE}*")]
    rate = max((rate for rate in rates if isinstance(rate, float)), default=None)
    return Ending(outcome, code, reason, steps, tried, place, incidents, tuple(bad), rate)


def _judged(
    control: Path,
    code: int,
    stopped: list[str],
    raised: dict[str, Any],
    finite: bool,  # noqa: FBT001
    steps: Steps | None,
) -> tuple[RunEnding, str]:
    number = code - _BY_SIGNAL
    if (control / INTERRUPTED).exists() or number in _WANTED:
        return RunEnding.INTERRUPTED, "it was interrupted"
    if stopped:
        return RunEnding.STOPPED, f"the guard stopped it: {stopped[0]}"
    if code == 0:
        return RunEnding.DONE, "it came to its end"
    if raised and _WORDS.search(f"{raised['type']} {raised['message']} {raised['code']}"):
        return RunEnding.NON_FINITE, _told(raised)
    if not finite:
        return (
            RunEnding.NON_FINITE,
            f"it ended with exit code {code}, and its weights are not finite",
        )
    if raised and steps is not None and _LOST.search(raised["message"]):
        return RunEnding.KILLED, f"a rank lost another one: {_told(raised)}"
    if number > 0 or (not raised and steps is not None and not _ended(control, steps.pid)):
        return RunEnding.KILLED, _killed(number)
    reason = _told(raised) if raised else f"it ended with exit code {code}"
    return (RunEnding.FAILED if steps is not None else RunEnding.NOT_BEGUN), reason


def _killed(number: int) -> str:
    if number <= 0:
        return "a process of it ended without a word, as one that is killed does"
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    more = " (out of memory, if nobody sent it)" if number == signal.SIGKILL else ""
    return f"{name} killed it{more}"


def _ended(control: Path, pid: int) -> bool:
    return (control / f"{ENDED}{pid}").exists()


def _told(raised: dict[str, Any]) -> str:
    first = (raised["message"].strip().splitlines() or [""])[0][:200]
    place = f" at {Path(raised['file']).name}:{raised['line']}" if raised["file"] else ""
    return f"it raised {raised['type']}{place}: {first}".rstrip(": ")


def _most_telling(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the exception that says most: one about numbers, else the first."""
    whole = [
        {**note, "type": str(note["type"]), "message": str(note.get("message", ""))}
        | {"file": str(note.get("file", "")), "code": str(note.get("code", ""))}
        | {"line": note.get("line", 0)}
        for note in found
        if "type" in note
    ]
    telling = [n for n in whole if _WORDS.search(f"{n['type']} {n['message']} {n['code']}")]
    return next(iter([*telling, *whole]), {})


def _notes(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(_text(path))
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _text(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(_LONGEST)
    except OSError:
        return ""
