"""Where in its data a run was: when a checkpoint was written, and when it ended.

A position counts steps from the beginning of the first attempt. An attempt that resumes stands
where its checkpoint stood, plus what it was to skip.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nanguard.run.recovering.audit import Judged, Stamp
    from nanguard.run.recovering.ending import Ending


# Steps that the clock of a file system may take for later than a file.
_UNSURE = 4


@dataclass(slots=True)
class Positions:
    """The positions of a run's checkpoints.

    Attributes:
        first: When the first attempt began.
        began: When the current attempt began.
        start: Where in the data it began.
        counted_from: The step that its script began to count with; None if that is not known.
        bad_until: How far the data is to be passed over.
    """

    first: float
    began: float
    start: int = 0
    counted_from: int | None = 0
    bad_until: int = 0
    _known: dict[tuple[str, Stamp], int] = field(default_factory=dict)

    def attempt_ended(self, ending: Ending, checkpoints: Sequence[Judged]) -> None:
        """Takes note of the checkpoints that an attempt has written."""
        for one in checkpoints:
            if one.key in self._known or one.written < self.began:
                continue
            done = 0 if ending.steps is None else ending.steps.until(one.written)
            if done is not None:
                self._known[one.key] = self.start + self._exact(done, one.step)

    def _exact(self, done: int, step: int | None) -> int:
        """Returns how many steps were done before a checkpoint, by its own count where that fits.

        By the clock, the last ones before it may be missing. What a checkpoint counts may be
        epochs, so its count is only taken if it comes to almost the same.
        """
        if step is None or self.counted_from is None:
            return done
        made = step - self.counted_from
        return made if done <= made <= done + _UNSURE else done

    def end_of(self, ending: Ending) -> int:
        """Returns the position behind the last step that an attempt has tried."""
        return self.start + ending.tried

    def after_trouble(self, ending: Ending, checkpoints: Sequence[Judged]) -> list[Judged]:
        """Returns the checkpoints that were written after the last trouble of a run had begun."""
        if not ending.over_numbers:
            return []
        since = self.start + ending.bad_since
        return [one for one in checkpoints if self._known.get(one.key, 0) > since]

    def of(self, checkpoint: Judged | None, good: Sequence[Judged] = ()) -> int | None:
        """Returns the position of a checkpoint; None if it is not known.

        Args:
            checkpoint: The checkpoint; None for the beginning.
            good: The good checkpoints, the newest first.
        """
        if checkpoint is None:
            return 0
        older = [one for one in good if one.written < self.first]
        if older and older[0].key == checkpoint.key:
            return 0  # the first attempt most likely went on from there
        return self._known.get(checkpoint.key)

    def begin(self, checkpoint: Judged | None, position: int | None, skip: int) -> None:
        """Takes note of where the next attempt begins.

        Args:
            checkpoint: What it resumes from; None for the beginning.
            position: The position of that; if it is not known, counting begins anew there.
            skip: How many steps of data it passes over.
        """
        if checkpoint is not None and position is None:
            self._known = {checkpoint.key: 0}
            self.bad_until = 0
        self.start = (position or 0) + skip
        self.counted_from = 0 if checkpoint is None else checkpoint.step

    def lost(self, ending: Ending, position: int | None) -> int | None:
        """Returns how many steps of an attempt are lost by going back to a position."""
        return None if position is None else max(0, self.end_of(ending) - position)

    def pass_over(self, ending: Ending, position: int | None, level: int) -> None:
        """Takes note of data that is to be passed over.

        Args:
            ending: The attempt that ended over its numbers.
            position: Where the next one resumes, if that is known.
            level: How often that was tried before without getting any further: so many times as
                much is passed over beyond it.
        """
        end = self.end_of(ending)
        beyond = 0 if position is None else level * (end - position)
        self.bad_until = max(self.bad_until, end + max(0, beyond))

    def skip_from(self, position: int | None) -> int:
        """Returns how many steps of data are to be passed over from a position on."""
        return 0 if position is None else max(0, self.bad_until - position)
