"""The attempts of a recovery: a line for each, and where in the data each of them was.

A position counts steps from the beginning of the first attempt. An attempt that resumes stands
where its checkpoint stood, plus what it was to skip.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from nanguard.errors import RecordError
from nanguard.masking import hidden_tree
from nanguard.run_folder import make_private

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from nanguard.run.recovering.audit import Judged, Stamp
    from nanguard.run.recovering.ladder import Ending

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


NAME = "lineage.jsonl"
SCHEMA = "nanguard.lineage/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One attempt.

    Attributes:
        attempt: Its number, counted from 1.
        started: When it began.
        ended: When it ended.
        command: What was run.
        checkpoint: What it resumed from; None for what the command says by itself.
        step: The step of that checkpoint; None if it is not known.
        changes: What it was to do differently.
        reason: Why it ended, in words.
        outcome: What became of it: done, interrupted, stopped, non-finite, killed, failed or
            not-begun.
        code: Its exit code; 3 if the guard stopped it.
        steps: How many steps it has tried.
        lost: How many of them the next attempt has to make again or leaves out; None if there is
            no next one, or it is not known.
        checkpoints: What the audit found; empty if there was none.
        incidents: The folders of its incidents.
        then: What was done next: end, restart, or the reason to give up.
    """

    attempt: int
    started: str
    ended: str
    command: list[str]
    checkpoint: str | None
    step: int | None
    changes: dict[str, Any]
    reason: str
    outcome: str
    code: int
    steps: int
    lost: int | None = None
    checkpoints: str = ""
    incidents: list[str] = field(default_factory=list)
    then: str = "end"


def append(folder: Path, line: Line) -> None:
    """Adds a line to the record of a folder, and sees it to the disk.

    Raises:
        RecordError: It cannot be written.
    """
    shown = hidden_tree({"schema": SCHEMA, **asdict(line)})
    data = json.dumps(shown, ensure_ascii=False) + "\n"
    path = folder / NAME
    try:
        make_private(folder)
        # One write of the whole line: two recoveries with one folder do not mix.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        try:
            os.write(descriptor, data.encode("utf-8", "backslashreplace"))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise RecordError(
            f"the record of the recovery cannot be written: {error.strerror}.",
            where=str(path),
            do="Make room, or give another folder: nanguard run --incidents DIR",
        ) from error
