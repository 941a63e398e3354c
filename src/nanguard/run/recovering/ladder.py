"""How an attempt has ended, as far as its processes have left word, and what to do then.

A run that was killed goes on as it was. One that ended over its numbers goes on with a lower
learning rate, and past the data. If that brings it no further, the cut is larger, then the
checkpoint older, and in the end it is left alone with a diagnosis.
"""

from __future__ import annotations

import json
import re
import signal
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanguard.run.control import (
    BAD,
    ENDED,
    INTERRUPTED,
    RAISED,
    RATE,
    STEPS,
    STOPPED,
    Steps,
    read_bad,
    read_steps,
)
from nanguard.run.recovering.audit import counted

if TYPE_CHECKING:
    from nanguard.run.recovering.audit import Audited, Judged, Stamp

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
    more = " (out of memory, perhaps)" if number == signal.SIGKILL else ""
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


USAGE = 2
# Restarts that may fail before their first step.
_REFUSALS = 2


@dataclass(frozen=True, slots=True)
class Means:
    """What can be changed from attempt to attempt.

    Attributes:
        lr: Whether the learning rate can be set.
        skip: Whether data can be skipped.
        seed: Whether the seed can be set.
    """

    lr: bool = False
    skip: bool = False
    seed: bool = False

    @property
    def any(self) -> bool:
        """Whether anything can."""
        return self.lr or self.skip or self.seed


@dataclass(frozen=True, slots=True)
class Restart:
    """Start again.

    Attributes:
        checkpoint: From where; None for the beginning.
        changed: Whether the numbers were the trouble, so that something has to change.
        level: How often the same was tried before without getting any further.
        factor: What the learning rate of the first attempt is multiplied with.
        seed: How often the seed was changed.
    """

    checkpoint: Judged | None
    changed: bool
    level: int
    factor: float
    seed: int


@dataclass(frozen=True, slots=True)
class End:
    """Leave it at that.

    Attributes:
        why: Why no further attempt is made; empty where none is needed.
    """

    why: str = ""


@dataclass(slots=True)
class Ladder:
    """Decides, and remembers what was tried.

    Attributes:
        max_restarts: How many restarts there may be.
        lr_cut: The factor of one cut.
        means: What can be changed.
        own_bad: Whether the command itself names a checkpoint that is bad.
        restarts: How many there were.
        factor: What the learning rate is multiplied with by now.
        aside: Checkpoints that are not to be resumed from: they come after one that was gone back
            to, or the command could not begin with them.
    """

    max_restarts: int
    lr_cut: float
    means: Means
    own_bad: bool = False
    restarts: int = 0
    factor: float = 1.0
    aside: set[tuple[str, Stamp]] = field(default_factory=set)
    _stuck: int = 0
    _condemned: int = 0
    _refusals: int = 0
    _seed: int = 0
    _used: tuple[str, Stamp] | None = None
    _raised: str = ""

    @property
    def wanted(self) -> int:
        """How many good checkpoints the next decision may need to know."""
        return self._stuck + 2

    def after(self, ending: Ending, found: Audited) -> Restart | End:
        """Returns what to do next.

        Args:
            ending: How the attempt ended.
            found: The checkpoints there are now, without those set aside.
        """
        if ending.outcome in (RunEnding.DONE, RunEnding.INTERRUPTED):
            return End()
        if self.restarts >= self.max_restarts:
            return End(f"{counted(self.max_restarts, 'restart')} spent, and no more are allowed")
        early = ending.outcome is RunEnding.NON_FINITE and ending.steps is None
        if ending.outcome is RunEnding.NOT_BEGUN or (early and self.restarts == 0):
            return self._not_begun(ending, found)
        self._refusals = 0
        hopeless = ending.hopeless and self._used is not None
        if hopeless and not found.good:
            return End("no step was good from any of its checkpoints on")
        newest = found.good[0].key if found.good else None
        moved = self.restarts == 0 or newest != self._used
        self._stuck = 0 if moved else self._stuck + 1
        same = self._stuck > 0 and ending.raised != "" and ending.raised == self._raised
        self._raised = ending.raised
        if same and ending.outcome is RunEnding.FAILED:
            return End(f"{ending.reason}, for the second time: a restart does not help")
        if hopeless:  # which says nothing about the learning rate, or the data
            return self._from(found, 0, 0, changed=False)
        return self._again(ending, found)

    def leave_behind(self, found: Audited) -> set[tuple[str, Stamp]]:
        """Returns what a checkpoint that is finite and leads to bad steps only speaks against.

        Nobody knows how long that has been so: half of the older ones, then three quarters of
        what is left, and so on.
        """
        keys = [one.key for one in found.all if one.key != self._used]
        self._condemned += 1
        left = max(1, len(keys) >> self._condemned)
        return {*keys[left:], *(() if self._used is None else (self._used,))}

    def _again(self, ending: Ending, found: Audited) -> Restart | End:
        # One that failed without a reason may have been unlucky once.
        failed = ending.outcome is RunEnding.FAILED
        changed = ending.over_numbers or (failed and self._stuck > 0)
        level = max(0, self._stuck - failed) if changed else 0
        # Those after the one that was gone back to are set aside, so one at a time is enough.
        back = int(level > 1 or (level > 0 and not self.means.any))
        if level > 1 and not self.means.any and len(found.good) < 2:
            return End(
                "nothing can be changed from one attempt to the next, and there is no older "
                "checkpoint: give --lr-arg or --skip-arg"
            )
        if changed:
            self.factor *= self.lr_cut ** (level + 1)
            self._seed += 1
        return self._from(found, back, level, changed=changed)

    def _not_begun(self, ending: Ending, found: Audited) -> Restart | End:
        """Decides about an attempt that came to no step."""
        said = f"{ending.reason}, before its first step"
        if self.restarts == 0:
            newest_bad = bool(found.bad) and found.all[-1] in found.bad
            if not found.good or not (newest_bad or self.own_bad):
                return End(f"{said}; a restart would end in the same way")
            return self._from(found, 0, 0, changed=False)
        self._refusals += 1
        refused = self._used
        rest = [one for one in found.good if one.key != refused]
        if ending.code == USAGE or self._refusals >= _REFUSALS or not rest:
            return End(
                f"{said}: look whether the command understands what the templates of --resume-arg, "
                "--lr-arg and --skip-arg make of it"
            )
        return self._from(found, 1, 0, changed=False)

    def _from(self, found: Audited, back: int, level: int, *, changed: bool) -> Restart | End:
        if not found.good and self.own_bad:
            return End(
                f"there is no good checkpoint ({found.in_words()}), and the one that the command "
                "itself resumes from is bad"
            )
        self.restarts += 1
        if not found.good:
            self._used = None
            return Restart(None, changed, level, self.factor, self._seed)
        chosen = found.good[min(back, len(found.good) - 1)]
        self._used = chosen.key
        later = found.all[found.all.index(chosen) + 1 :]
        self.aside |= {one.key for one in later}
        return Restart(chosen, changed, level, self.factor, self._seed)
