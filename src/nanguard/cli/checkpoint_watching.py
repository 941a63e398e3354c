"""``nanguard check --watch``: each checkpoint of a running job, once it is written."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from nanguard.check.checkpoint.checkpoint_reader import CheckpointWatcher
from nanguard.check.outcome import Outcome
from nanguard.check.scan_check import Bench
from nanguard.errors import UsageError
from nanguard.view.report.findings_text import brief
from nanguard.view.report.words import literal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.checkpoint.checkpoint import Checkpoint
    from nanguard.check.engine import Plan
    from nanguard.check.outcome import Seen
    from nanguard.cli.commands.before import CheckOptions

EVERY = 2.0  # seconds; a checkpoint is read once it has not changed from one look to the next
LAST_GOOD = "last-good-checkpoint"


def refuse_what_cannot_be_watched(asked: CheckOptions) -> None:
    """Stops where options are given that watching cannot follow.

    Raises:
        UsageError: There are such options.
    """
    where = "nanguard check --watch"
    if asked.form not in ("text", "json"):
        raise UsageError(
            f"there is no format {asked.form!r} for a report that grows.",
            where=where,
            do="Give --format text, or json for one object a line.",
        )
    if asked.fix or asked.diff or asked.checklist or asked.write_baseline or asked.output:
        raise UsageError(
            "watching repairs nothing, and writes to standard output only.",
            where=where,
            do="Leave out --fix, --diff, --checklist, --write-baseline and --output.",
        )
    far = [path for path in asked.paths if "://" in path or path == "-"]
    if far:
        raise UsageError(
            f"{far[0]} cannot be watched.", where=where, do="Give a folder of this machine."
        )


@dataclass(slots=True)
class CheckpointAudit:
    """The audit of checkpoints as they come.

    Attributes:
        plan: What is checked, and how.
        form: Output format: text or json.
        quiet: Whether to be silent about good ones.
        found: Everything that was found.
    """

    plan: Plan
    form: str = "text"
    quiet: bool = False
    found: Outcome = field(default_factory=Outcome)
    _last_good: str = ""

    def run(self, paths: tuple[str, ...]) -> Outcome:
        """Looks again and again, until Ctrl-C; returns what was found in the end."""
        watchers = [CheckpointWatcher(Path(path), self.plan.scan) for path in paths]
        if self.form == "text" and not self.quiet:
            self._say(
                f"watching {', '.join(literal(path, 1000) for path in paths)}; Ctrl-C ends it"
            )
        try:
            while True:
                for watcher in watchers:
                    for checkpoint in watcher.look():
                        self._report(checkpoint)
                time.sleep(EVERY)
        except KeyboardInterrupt:
            return self.found

    def _report(self, checkpoint: Checkpoint) -> None:
        outcome = self._judged(checkpoint)
        outcome.seen += self._news_of_the_run(checkpoint, outcome)
        self.found.seen += outcome.seen
        if self.form == "json":
            from nanguard.view.report.findings_export import as_line

            self._say(as_line(outcome))
            return
        bad = any(one.finding.name != LAST_GOOD for one in outcome.seen)
        if not (self.quiet and not bad):
            verdict = "BAD" if bad else "not checked" if outcome.not_checked else "good"
            self._say(f"{time.strftime('%H:%M:%S')}  {literal(checkpoint.path, 1000)}: {verdict}")
        lines = [f"  {line}" for line in brief(outcome).splitlines()]
        lines += [f"  {literal(e.path, 1000)}: {literal(e.reason)}" for e in outcome.not_checked]
        if lines:
            self._say("\n".join(lines))

    def _judged(self, checkpoint: Checkpoint) -> Outcome:
        selection = self.plan.selection
        bench = Bench("checkpoint", selection.rules("checkpoint"), selection, self.plan.scan)
        outcome = Outcome()
        for file in bench.judged(checkpoint):
            outcome.add(file)
        return outcome

    def _news_of_the_run(self, checkpoint: Checkpoint, latest: Outcome) -> Iterator[Seen]:
        """Yields which checkpoint is the last good one, if that is news."""
        others = [] if checkpoint.run is None else checkpoint.run.checkpoints
        seen = [
            one for other in others if other is not checkpoint for one in self._judged(other).seen
        ]
        for one in [*latest.seen, *seen]:
            if one.finding.name == LAST_GOOD and one.finding.message != self._last_good:
                self._last_good = one.finding.message
                if one not in latest.seen:
                    yield one

    def _say(self, text: str) -> None:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
