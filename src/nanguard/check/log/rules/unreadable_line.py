"""LOG010: lines of a log that cannot be read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.check.log.log_rule import LogRule
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.log.series import BadLine, Log
    from nanguard.findings import Finding


class UnreadableLine(LogRule):
    """A line is not complete JSON, a row lacks cells, or bytes are zero or broken.

    All other lines are read and judged. A last line that has no end is left alone: it may still be
    being written. So are lines of plain text between lines of JSON, unless the file is a .jsonl.

    Why it breaks a run: it does not, but the number that went bad may stand on that very line. A
    disk that was full, a machine that went down and two processes that write to one file leave
    such lines, and all three harm checkpoints as well.

    Look at the line, and at what happened on the machine at that time.
    """

    code = "LOG010"
    name = "unreadable-line"
    severity = Severity.WARNING
    seen_in = "https://github.com/dbolya/yolact/issues/710"
    examples = (
        Passes('{"step": 1, "loss": 2.0}\nloading\n{"step": 2, "loss": 1.9}\n{"st', "train.log"),
        Passes("step,loss,acc\n1,2.0,\n2,1.9,0.5\n3,1.8", "metrics.csv"),
        Fails(
            '{"step": 1, "loss": 2.0}\n{"step": 2, "lo\n{"step": 3, "loss": 1.9}\n',
            line=2,
            file="metrics.jsonl",
        ),
        Fails("step,loss,acc\n1,2.0,0.4\n2,1.9\n3,1.8,0.6\n", line=3, file="metrics.csv"),
        Fails("step 1 loss 2.0\n\0\0\0\0step 2 loss 1.9\nstep 3 loss 1.8\n", 2, "train.log"),
    )

    def check(self, source: Log) -> Iterator[Finding]:
        """Yields one finding for each kind of damage, at its first line."""
        kinds: dict[tuple[str, str], list[BadLine]] = {}
        for bad in source.bad_lines:
            kinds.setdefault((bad.path, bad.what), []).append(bad)
        for (path, what), lines in kinds.items():
            more = f" ({len(lines)} such lines)" if len(lines) > 1 else ""
            said = f"line {lines[0].line} cannot be read: {what}{more}"
            yield self.finding(said, path=path or source.path, line=lines[0].line, where="line")
