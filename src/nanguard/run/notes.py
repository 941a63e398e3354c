"""The notes in the control folder of a run: what its processes tell each other, by file name.

``nanguard run`` makes one folder for each run (``Options.control``). The processes below it leave
small files there, and the launcher reads them. A name that ends with a dash is followed by the
number of the process (``attached-4711``) or, where it says so, by the name of an incident's folder
(``trying-step-000007-rank0``).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from nanguard.diagnose.limits import TRYING as TRYING
from nanguard.masking import hidden

if TYPE_CHECKING:
    from pathlib import Path

# Nanguard is in this process, which is about to import torch, if it is not just looking for it.
# Written by attach.py, read by unguarded.py. Empty.
REACHED = "reached-"
# Torch was imported, and this process is guarded from here on. A process that only starts others
# leaves none. Written by incident_writer.py. Empty.
ATTACHED = "attached-"
# The process has made its first step, or its first backward where there is no optimizer. Written
# by live.py, also for a script with a Guard of its own. Empty.
STEPPED = "stepped-"
# This process uses torch, and nanguard could not get into it. Written by unguarded.py, in the
# launcher. Empty.
UNGUARDED = "unguarded-"
# The guard has ended the run. Written by incident_writer.py. The reason.
STOPPED = "stopped-"

# TRYING ("trying-"): a replay of an explanation has begun, in a second run. Named after the
# incident's folder. Written by diagnosis/session.py for each replay. JSON: until when it may go on.

# The notes of a run that may be recovered; pulse.py writes them and says what they hold.
STEPS = "steps-"
ENDED = "ended-"
RAISED = "raised-"
RATE = "rate-"
BAD = "bad-"

# The user, or the system, wants the run to end. Written by command.py. Empty, with no number.
INTERRUPTED = "interrupted"


def leave(control: Path, name: str, text: str = "") -> None:
    """Leaves a note; a folder that is gone or full must not end the run."""
    with contextlib.suppress(OSError):
        (control / name).write_text(hidden(text))


def processes(control: Path, kind: str) -> set[int]:
    """Returns the processes that have left a kind of note."""
    numbers = (path.name.removeprefix(kind) for path in control.glob(f"{kind}*"))
    return {int(number) for number in numbers if number.isdecimal()}
