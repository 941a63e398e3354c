"""Runs a command under the guard, and starts it again from its last good checkpoint if it ends."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanguard import incident
from nanguard.errors import IncidentError, NanguardError, SourceError
from nanguard.run.children import adopt_orphans, end_descendants
from nanguard.run.command import must_be_there, run_command
from nanguard.run.control import now_as_files_have_it
from nanguard.run.recovering import lineage
from nanguard.run.recovering.audit import Audited, Auditor, CheckpointVerdict, Places, counted
from nanguard.run.recovering.ladder import End, Ladder, Restart, RunEnding, read_ending
from nanguard.run.recovering.lineage import Positions
from nanguard.run.recovering.restart_options import Changes, Teller

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nanguard.run.recovering.ladder import Ending
    from nanguard.run.recovering.restart_options import RestartOptions

INTERRUPTED = 130
_LONGEST_WAIT = 300.0


def recover_command(
    command: Sequence[str],
    restart: RestartOptions,
    *,
    incidents: Path,
    quiet: bool = False,
    **guarding: Any,
) -> int:
    """Runs a command until it comes to its end, or cannot be helped; returns the exit code.

    Args:
        command: The command.
        restart: How it is restarted.
        incidents: The folder for incidents and for the record.
        quiet: Whether to say nothing.
        guarding: How each attempt is guarded, as in ``run_command``.

    Raises:
        UsageError: It could not be restarted as the user says.
    """
    must_be_there(command)
    teller = Teller.of(command, restart)
    since = now_as_files_have_it()
    auditor = Auditor(Places.of(restart.checkpoints, command, since))
    ladder = Ladder(restart.max_restarts, restart.lr_cut, teller.means)
    counted_from = 0 if teller.resumes_from() is None else None
    positions = Positions(first=since, began=since, counted_from=counted_from)
    adopt_orphans()
    recovery = JobRecovery(
        teller, auditor, ladder, positions, incidents, restart.backoff, quiet, guarding
    )
    return recovery.run()


@dataclass(slots=True)
class _Attempt:
    """What is being run.

    Attributes:
        changes: What it does differently.
        command: The command.
        config: The configuration that was written for it.
        started: When it began.
    """

    changes: Changes
    command: list[str]
    config: str | None = None
    started: str = field(default_factory=lambda: _now())


@dataclass(slots=True)
class JobRecovery:
    """A run of several attempts.

    Attributes:
        teller: The ways to tell the command what to do differently.
        auditor: Reads checkpoints.
        ladder: Decides.
        positions: Where in the data checkpoints are.
        incidents: The folder for incidents and for the record.
        backoff: Seconds before the first restart.
        quiet: Whether to say nothing.
        guarding: How each attempt is guarded.
    """

    teller: Teller
    auditor: Auditor
    ladder: Ladder
    positions: Positions
    incidents: Path
    backoff: float
    quiet: bool
    guarding: dict[str, Any]

    def run(self) -> int:
        """Runs attempt after attempt; returns the exit code."""
        attempt = _Attempt(Changes(1), list(self.teller.command))
        while True:
            ending = self._run(attempt)
            self._tell_of_rate(attempt.changes, ending)
            if ending.outcome in (RunEnding.DONE, RunEnding.INTERRUPTED):
                self._ended(attempt, ending)
                if self.ladder.restarts:
                    number, steps = attempt.changes.attempt, counted(ending.tried, "step")
                    self._say(f"attempt {number}: {ending.reason} after {steps}")
                return ending.code
            try:
                end_descendants()
                changes = self._next(attempt, ending)
                following = None if changes is None else self._after_waiting(changes, ending)
            except KeyboardInterrupt:
                self._say("interrupted between two attempts; the command is not started again")
                return INTERRUPTED
            if following is None:
                return ending.code
            attempt = following

    def _run(self, attempt: _Attempt) -> Ending:
        before = set(self.incidents.glob("*/incident.json"))
        self.positions.began = now_as_files_have_it()
        control = Path(tempfile.mkdtemp(prefix="nanguard-run-"))
        try:
            code = run_command(
                attempt.command,
                incidents=self.incidents,
                quiet=self.quiet,
                control=control,
                **self.guarding,
            )
            new = sorted(set(self.incidents.glob("*/incident.json")) - before)
            return read_ending(control, code, tuple(path.parent for path in new))
        finally:
            shutil.rmtree(control, ignore_errors=True)

    def _after_waiting(self, changes: Changes, before: Ending) -> _Attempt | None:
        """Returns the next attempt, its configuration written; None if that cannot be."""
        self._wait()
        why = f"attempt {changes.attempt - 1} ended: {before.reason}"
        try:
            command, config = self.teller.command_for(changes, why, self.incidents)
        except (SourceError, OSError) as error:  # somebody has changed it since the start
            why = error.what if isinstance(error, SourceError) else str(error)
            none = replace(before, outcome=RunEnding.NOT_BEGUN, reason=why, tried=0, incidents=())
            self._ended(_Attempt(changes, list(self.teller.command)), none, then=why)
            self._say(f"not started again: {error}")
            return None
        return _Attempt(changes, command, config)

    def _next(self, attempt: _Attempt, ending: Ending) -> Changes | None:
        """Returns what the next attempt does differently; None if there is none."""
        if not attempt.changes.checkpoint:
            self.ladder.own_bad = self._own_is_bad()
        found = self._audited(ending)
        decision = self.ladder.after(ending, found)
        if isinstance(decision, Restart) and not self.teller.can_name(decision.checkpoint):
            unknown = "" if decision.checkpoint is None else decision.checkpoint.path
            decision = End(f"nothing says which step {unknown} is of, for {{step}}")
        if isinstance(decision, End):
            self._ended(attempt, ending, found, decision.why)
            self._diagnose(ending, found, decision.why)
            return None
        return self._restart(attempt, ending, found, decision)

    def _audited(self, ending: Ending) -> Audited:
        """Returns the checkpoints that may be resumed from."""
        aside = self.ladder.aside
        found = self.auditor.look(self.ladder.wanted, aside)
        self.positions.attempt_ended(ending, found.all)
        late = {one.key for one in self.positions.after_trouble(ending, found.all)}
        if ending.hopeless:
            first = self.ladder.restarts == 0
            late |= self._own_and_later(found) if first else self.ladder.leave_behind(found)
        aside |= late
        return self.auditor.look(self.ladder.wanted, aside) if late else found

    def _own_and_later(self, found: Audited) -> set[tuple[str, Any]]:
        """Returns the checkpoint that the command itself resumes from, and those after it."""
        own = self.teller.resumes_from()
        judged = None if own is None else self.auditor.judge(own)
        keys = [one.key for one in found.all]
        if judged is None:
            return set()
        same = [at for at, one in enumerate(found.all) if one.stamp == judged.stamp]
        return {judged.key, *(keys[same[0] :] if same else ())}

    def _restart(
        self, attempt: _Attempt, ending: Ending, found: Audited, decision: Restart
    ) -> Changes:
        position = self.positions.of(decision.checkpoint, found.good)
        lost = self.positions.lost(ending, position)
        if decision.changed:
            self.positions.pass_over(ending, position, decision.level)
        changes = self._changes(attempt, decision, position)
        self._ended(attempt, ending, found, "restart", lost)
        restart = f"restart {self.ladder.restarts} of {self.ladder.max_restarts}"
        self._say(
            f"attempt {attempt.changes.attempt} ended after {counted(ending.tried, 'step')}: "
            f"{ending.reason}; {found.in_words()}; {restart} {changes.in_words()}"
            + (f"; {counted(lost, 'step')} lost" if lost is not None else "")
        )
        return changes

    def _changes(self, attempt: _Attempt, decision: Restart, position: int | None) -> Changes:
        means, checkpoint = self.teller.means, decision.checkpoint
        skip = self.positions.skip_from(position) if means.skip and checkpoint else 0
        self.positions.begin(checkpoint, position, skip)
        return Changes(
            attempt.changes.attempt + 1,
            "" if checkpoint is None else checkpoint.path,
            None if checkpoint is None else checkpoint.step,
            self.teller.lr * decision.factor
            if self.teller.lr is not None and decision.factor < 1
            else None,
            skip,
            self.teller.seed + decision.seed if means.seed and decision.seed else None,
        )

    def _own_is_bad(self) -> bool:
        """Returns whether the command itself resumes from a checkpoint that is bad."""
        own = self.teller.resumes_from()
        judged = None if own is None else self.auditor.judge(own)
        return judged is not None and judged.verdict in (
            CheckpointVerdict.DAMAGED,
            CheckpointVerdict.POISONED,
        )

    def _ended(
        self,
        attempt: _Attempt,
        ending: Ending,
        found: Audited | None = None,
        then: str = "end",
        lost: int | None = None,
    ) -> None:
        """Writes the line of an attempt."""
        changes = attempt.changes
        new = {"lr": changes.lr, "skip": changes.skip or None, "seed": changes.seed}
        line = lineage.Line(
            attempt=changes.attempt,
            started=attempt.started,
            ended=_now(),
            command=attempt.command,
            checkpoint=changes.checkpoint or None,
            step=changes.step,
            changes={k: v for k, v in {**new, "config": attempt.config}.items() if v is not None},
            reason=ending.reason,
            outcome=ending.outcome.value,
            code=ending.code,
            steps=ending.tried,
            lost=lost,
            checkpoints="" if found is None else found.in_words(),
            incidents=[folder.name for folder in ending.incidents],
            then=then,
        )
        try:
            lineage.append(self.incidents, line)
        except NanguardError as error:
            self._say(str(error))

    def _diagnose(self, ending: Ending, found: Audited, why: str) -> None:
        """Says why no further attempt is made, and what is known of the trouble."""
        self._say(f"not started again: {why}")
        last = "" if not found.good else f"; the last good one is {found.good[0].in_words()}"
        if self.ladder.aside:
            last += f"; {counted(len(self.ladder.aside), 'other')} left behind"
        self._say(f"  {found.in_words()}{last}")
        causes = [cause for folder in ending.incidents if (cause := _cause(folder))]
        if causes:
            self._say(f"  the last incident: {causes[-1]}")
        self._say(f"  what was tried: {self.incidents / lineage.NAME}")

    def _tell_of_rate(self, changes: Changes, ending: Ending) -> None:
        """Says so if the command has not taken the learning rate it was given."""
        # A lower one may be that of a warm-up.
        if changes.lr is None or ending.rate is None or ending.rate <= changes.lr * 1.001:
            return
        self._say(
            f"attempt {changes.attempt} was given the learning rate {changes.lr:g} and began with "
            f"{ending.rate:g}: the checkpoint brings its own, in the optimizer or in the schedule "
            "(base_lrs); set it after loading"
        )

    def _wait(self) -> None:
        """Waits before a restart, each time twice as long."""
        seconds = min(_LONGEST_WAIT, self.backoff * 2 ** (self.ladder.restarts - 1))
        if seconds > 0:
            time.sleep(seconds)

    def _say(self, text: str) -> None:
        if not self.quiet:
            print(f"nanguard: {text}", file=sys.stderr, flush=True)  # noqa: T201 - the user is here


def _cause(folder: Path) -> str:
    try:
        found = incident.read(folder)
    except IncidentError:
        return ""
    cause = found.get("cause") or {}
    said = f"{cause['code']}: {cause.get('summary')}" if cause.get("code") else "not explained"
    return f"{said} (nanguard explain {folder})"


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
