"""``nanguard check``: from the words on the command line to the exit code."""

from __future__ import annotations

import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nanguard.check.code_check import processors
from nanguard.check.engine import Check, Plan
from nanguard.check.project_settings import ProjectSettings, expected_also, find_project
from nanguard.check.rule import KINDS
from nanguard.check.scan import Scan
from nanguard.check.selection import UNUSED_IGNORE, Selection
from nanguard.cli.printing import print_report, rendered
from nanguard.errors import UsageError
from nanguard.findings import Severity

if TYPE_CHECKING:
    from nanguard.check.outcome import Outcome
    from nanguard.check.selection import Baseline
    from nanguard.cli.commands.before import CheckOptions
    from nanguard.cli.progress import Progress


UNABLE = 2


def run_check(asked: CheckOptions) -> int:
    """Checks what was named and prints what came of it; returns the exit code.

    Raises:
        NanguardError: Nothing could be done.
    """
    from nanguard.cli.progress import Progress

    if asked.checklist:
        from nanguard.cli.listing import refuse_what_a_checklist_has_not

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
        from nanguard.cli.listing import answered

        told, code = answered(asked, check, asked.fail_on or project.fail_on)
        print_report(asked, told)
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
    """Stops where a repair is asked for that would not be made."""
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
    from nanguard.view.report.fields import literal

    refused = check.refused()
    told = [entry for entry in check.outcome.not_checked if entry.path in asked.paths]
    # The report for people has said it; every other one may be read by nobody.
    shown = asked.form in ("text", "full") and not asked.quiet and asked.output is None
    for entry in dict.fromkeys((*refused, *(told if asked.quiet else ()))):
        if not shown or entry not in check.outcome.not_checked:
            reason = f"{literal(entry.path)} not checked: {literal(entry.reason)}"
            sys.stderr.write(f"nanguard: {reason}\n")
    return UNABLE if refused else 0


def _watched(asked: CheckOptions) -> int:
    from nanguard.cli.checkpoint_watching import CheckpointAudit, refuse_what_cannot_be_watched
    from nanguard.cli.progress import Progress

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
    return UsageError(
        f"{one}.",
        where="nanguard check",
        do="Give files, folders, patterns in quotes, or - for standard input.",
    )
