"""The record of a recovery: one line for each attempt, there for good once it is written."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from nanguard.errors import RecordError
from nanguard.masking import hidden_tree
from nanguard.run_folder import make_private

if TYPE_CHECKING:
    from pathlib import Path

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
