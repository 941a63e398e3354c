"""What to do after an attempt has ended. Pure decisions; nothing is read, written or started.

A run that was killed goes on as it was. One that ended over its numbers goes on with a lower
learning rate, and past the data. If that brings it no further, the cut is larger, then the
checkpoint older, and in the end it is left alone with a diagnosis.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nanguard.run.recovering.audit import counted
from nanguard.run.recovering.ending import RunEnding

if TYPE_CHECKING:
    from nanguard.run.recovering.audit import Audited, Judged, Stamp
    from nanguard.run.recovering.ending import Ending

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
