"""``nanguard check``: from the command line to the report, its progress and the exit code.

With ``--watch``, each checkpoint of a running job is checked once it is written.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanguard.check.code_check import processors
from nanguard.check.engine import Check, Plan
from nanguard.check.outcome import Outcome
from nanguard.check.project_settings import ProjectSettings, expected_also, find_project
from nanguard.check.rule import KINDS
from nanguard.check.scan import Scan
from nanguard.check.scan_check import Bench
from nanguard.check.selection import UNUSED_IGNORE, Selection
from nanguard.cli.command_line import did_you_mean
from nanguard.cli.entry import drop_output, write_output
from nanguard.errors import UsageError
from nanguard.findings import Severity
from nanguard.view.report.findings_formats import brief
from nanguard.view.report.words import literal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.checkpoint.checkpoint import Checkpoint
    from nanguard.check.outcome import Seen
    from nanguard.check.selection import Baseline
    from nanguard.cli.commands.before import CheckOptions

# Seconds after which a bar is shown on a terminal, and between two of its frames.
_AFTER = 1.0
_EVERY = 0.1
# Seconds after which a line is written where there is no terminal, and between two.
_LINE_AFTER = 10.0
_LINE_EVERY = 30.0
# The exit code when nothing could be checked.
UNABLE = 2


def print_report(asked: CheckOptions, report: str) -> None:
    """Writes a report to a file or to standard output.

    Raises:
        UsageError: It cannot be written.
    """
    if asked.output is not None:
        data = report.encode("utf-8", "backslashreplace")
        do = "Choose another file for --output."
        write_output(asked.output, data, what="the report", do=do)
        return
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        sys.stdout.write(report)
        sys.stdout.flush()
    except BrokenPipeError:
        drop_output()


def rendered(asked: CheckOptions, outcome: Outcome) -> str:
    """Returns an outcome in the format of the options."""
    if asked.form == "json":
        from nanguard.view.report.findings_formats import as_json

        return as_json(outcome)
    if asked.form == "sarif":
        from nanguard.cli.rulepages import sentences
        from nanguard.view.report.findings_formats import as_sarif

        return as_sarif(outcome, sentences({seen.finding.code for seen in outcome.seen}))
    if asked.form == "github":
        from nanguard.view.report.findings_formats import as_github

        return as_github(outcome)
    from nanguard.view.report.findings_formats import Page, brief, statistics

    if asked.statistics:
        return statistics(outcome)
    if asked.quiet or asked.form == "concise":
        return brief(outcome)
    terminal = asked.output is None and sys.stdout.isatty()
    plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    width = shutil.get_terminal_size((100, 25)).columns
    return Page(
        outcome,
        colour=terminal and not plain,
        width=width,
        verbose=asked.verbose,
        full=asked.form == "full",
    ).render()


class Progress:
    """Shows how far a check is.

    Args:
        quiet: Whether to show nothing at all.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._terminal = sys.stderr.isatty()
        self._began = time.monotonic()
        self._shown = self._began - _LINE_EVERY
        self._bar: Any = None
        self._task: Any = None
        self._what = ""

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        """Shows how many files are checked."""
        self._show(done, total, "checking")

    def scanned(self, done: int, total: int) -> None:
        """Shows how many bytes of data, checkpoints and logs are read."""
        self._show(done, total, "scanning")

    def _show(self, done: int, total: int, what: str) -> None:
        now = time.monotonic()
        after, every = (_AFTER, _EVERY) if self._terminal else (_LINE_AFTER, _LINE_EVERY)
        if self._quiet or now - self._began < after or now - self._shown < every:
            return
        self._shown = now
        if not self._terminal:
            unit = f"of {total} files" if what == "checking" else f"of {total / 1e6:.0f} MB"
            count = f"{done}" if what == "checking" else f"{done / 1e6:.0f}"
            seconds = now - self._began
            sys.stderr.write(f"nanguard: {what} ... {count} {unit}, {seconds:.0f} s\n")
            sys.stderr.flush()
            return
        if self._bar is None or what != self._what:
            self._start(total, what)
        self._bar.update(self._task, completed=done, total=total)
        self._bar.refresh()

    def _start(self, total: int, what: str) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
        from rich.progress import Progress as Bar

        if self._bar is not None:
            self._bar.stop()
        files = [MofNCompleteColumn()]
        counts = files if what == "checking" else [DownloadColumn(), TransferSpeedColumn()]
        # No thread of its own: processes are forked while it is shown.
        self._bar = Bar(
            TextColumn(what),
            BarColumn(),
            *counts,
            TimeRemainingColumn(),
            console=Console(stderr=True),
            auto_refresh=False,
            transient=True,
        )
        self._what, self._task = what, self._bar.add_task(what, total=total)
        self._bar.start()


def run_check(asked: CheckOptions) -> int:
    """Checks what was named and prints the report; returns the exit code.

    Raises:
        NanguardError: Nothing could be done.
    """
    if asked.checklist:
        from nanguard.cli.checklist_report import refuse_what_a_checklist_has_not

        refuse_what_a_checklist_has_not(asked)
    _refuse_what_does_nothing(asked)
    if asked.watch:
        return _watched(asked)
    project = find_project(_start(asked.paths))
    baseline = _baseline(asked, project)
    # Ray speaks on standard output, which belongs to the report.
    aside = redirect_stdout(sys.stderr) if asked.engine == "ray" else nullcontext()
    with Progress(quiet=asked.quiet) as progress, aside:
        check = Check(_plan(asked, project, progress))
        outcome = check.run(asked.paths)
    if not check.existing:
        raise _nothing_there(asked.paths, outcome)
    if asked.checklist:
        from nanguard.cli.checklist_report import answered

        report, code = answered(asked, check, asked.fail_on or project.fail_on)
        print_report(asked, report)
        return _refused(asked, check) or code
    if asked.fix or asked.diff:
        from nanguard.check.fixing import Fixing

        Fixing(check, unsafe=asked.unsafe, write=not asked.diff, baseline=baseline).run()
    if asked.write_baseline is not None:
        return _write_baseline(asked.write_baseline, outcome) or _refused(asked, check)
    if baseline is not None:
        _compare(outcome, baseline, check)
    print_report(asked, rendered(asked, outcome))
    return _refused(asked, check) or exit_code(outcome, asked.fail_on or project.fail_on)


def _refuse_what_does_nothing(asked: CheckOptions) -> None:
    """Stops where options are given that would do nothing."""
    if (asked.fix or asked.diff) and any("://" in path for path in asked.paths):
        raise UsageError(
            "files that lie elsewhere are not repaired.",
            where="nanguard check --fix",
            do="Copy them here first.",
        )
    if asked.unsafe and not (asked.fix or asked.diff):
        raise UsageError(
            "--unsafe repairs nothing by itself.",
            where="nanguard check --unsafe",
            do="Give --fix --unsafe, or --diff --unsafe to see it first.",
        )


def _refused(asked: CheckOptions, check: Check) -> int:
    """Says on standard error what could not be read though it was named; returns 2 if anything."""
    from nanguard.view.report.words import literal

    refused = check.refused()
    refused_paths = [entry for entry in check.outcome.not_checked if entry.path in asked.paths]
    # The report for people has said it; every other one may be read by nobody.
    shown = asked.form in ("text", "full") and not asked.quiet and asked.output is None
    for entry in dict.fromkeys((*refused, *(refused_paths if asked.quiet else ()))):
        if not shown or entry not in check.outcome.not_checked:
            reason = f"{literal(entry.path)} not checked: {literal(entry.reason)}"
            sys.stderr.write(f"nanguard: {reason}\n")
    return UNABLE if refused else 0


def _watched(asked: CheckOptions) -> int:
    from nanguard.cli.checking import CheckpointAudit, refuse_what_cannot_be_watched

    refuse_what_cannot_be_watched(asked)
    project = find_project(_start(asked.paths))
    plan = _plan(asked, project, Progress(quiet=True))
    found = CheckpointAudit(plan, asked.form, asked.quiet).run(asked.paths)
    return exit_code(found, asked.fail_on or project.fail_on)


def exit_code(outcome: Outcome, fail_on: str) -> int:
    """Returns 1 if any finding is as bad as ``fail_on`` or worse."""
    worst = outcome.worst()
    if fail_on == "none" or worst is None:
        return 0
    return int(worst.rank >= Severity(fail_on).rank)


def _start(paths: tuple[str, ...]) -> str:
    """Returns where the search for settings begins: at the first path that is one."""
    place = next((Path(path) for path in paths if path != "-"), Path())
    while not place.exists() and place != place.parent:
        place = place.parent
    return str(place if place.is_dir() else place.parent)


def _plan(asked: CheckOptions, project: ProjectSettings, progress: Progress) -> Plan:
    root = str(project.root)
    selection = Selection(
        asked.select or project.select,
        (*project.ignore, *asked.ignore),
        project.per_file,
        root,
        (*project.extend, *asked.extend),
    ).checked_words()
    # Kept outcomes hold no edits, which repairs are made of.
    fresh = asked.no_cache or asked.fix or asked.diff
    cache = None if fresh else project.root / ".nanguard" / "cache"
    return Plan(
        selection,
        project.exclude,
        root,
        asked.jobs,
        cache,
        progress,
        _scan(asked, project),
        progress.scanned,
    )


def _scan(asked: CheckOptions, project: ProjectSettings) -> Scan:
    expected = expected_also(
        project.expected,
        label_key=asked.label_key,
        classes=asked.classes,
        groups=asked.group,
        vocab=asked.vocab,
        ignored=asked.ignore_label,
    )
    scan = Scan(expected, threads=asked.jobs or processors())
    if asked.engine == "ray":
        from nanguard.check.scan_check import on_ray, ready

        ready()
        return replace(scan, spread=on_ray)
    return scan


def _baseline(asked: CheckOptions, project: ProjectSettings) -> Baseline | None:
    file = asked.baseline or project.baseline
    if file is None or asked.write_baseline is not None:
        return None
    from nanguard.check.selection import Baseline

    return Baseline.read(file)


def _write_baseline(file: Path, outcome: Outcome) -> int:
    from nanguard.check.selection import Baseline

    Baseline.of(file, outcome.seen).write()
    count = len(outcome.seen)
    known = "1 finding is" if count == 1 else f"{count} findings are"
    sys.stdout.write(f"{known} now known: {file}\n")
    return 0


def _compare(outcome: Outcome, baseline: Baseline, check: Check) -> None:
    found = outcome.seen
    outcome.seen = baseline.new(found)
    outcome.known = len(found) - len(outcome.seen)
    selection = check.plan.selection
    names = [rule.name for kind in KINDS for rule in selection.rules(kind)]
    outcome.stale = baseline.stale(found, outcome.checked, [*names, UNUSED_IGNORE[1]])


def _nothing_there(paths: tuple[str, ...], outcome: Outcome) -> UsageError:
    one = "none of the paths exists"
    if len(paths) == 1:
        reasons = [entry.reason for entry in outcome.not_checked if entry.path == paths[0]]
        one = f"{(reasons or ['there is no such file'])[0]}: {paths[0]}"
    beside = [str(near) for path in paths for near in _beside(path)]
    otherwise = "Give files, folders, patterns in quotes, or - for standard input."
    do = did_you_mean(paths[0], beside, otherwise)
    return UsageError(f"{one}.", where="nanguard check", do=do)


def _beside(path: str) -> list[Path]:
    """Returns what lies in the folder of a file that is not there."""
    try:
        return list(Path(path).parent.iterdir())[:_LOOKED_THROUGH]
    except OSError:
        return []


# Files that are looked through for one that somebody may have meant.
_LOOKED_THROUGH = 1000
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
        from nanguard.check.checkpoint.checkpoint_reader import CheckpointWatcher

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
            from nanguard.view.report.findings_formats import as_line

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
