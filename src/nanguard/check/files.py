"""The check of one file of Python code or one notebook, on its own."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

from nanguard.check.catalogue import all_rules
from nanguard.check.judging import in_order, judge, seen_in
from nanguard.check.kinds import HEAD, FileKind, kind_of
from nanguard.check.limits import TooSlowError, cpu_limit
from nanguard.check.outcome import FileOutcome, NotChecked, Omission, failure, reason_of
from nanguard.check.suppressions import ignores_in, suppress, unused
from nanguard.errors import SourceError
from nanguard.source.edits import diff_of
from nanguard.source.files import NOTEBOOK_LIMIT, PYTHON_LIMIT, decode, read_bytes
from nanguard.source.text import Text

if TYPE_CHECKING:
    from nanguard.check.code.project import Project
    from nanguard.check.selection import Selection
    from nanguard.findings import Finding, Fix
    from nanguard.source.notebook import Notebook

_SECONDS = 15.0


def check_path(
    path: str, kind: FileKind, selection: Selection, project: Project | None = None
) -> FileOutcome:
    """Returns what came of a file of Python code or a notebook.

    Args:
        path: The file.
        kind: What it is taken for.
        selection: The rules of the check.
        project: The files it may import from.
    """
    try:
        limit = NOTEBOOK_LIMIT if kind is FileKind.NOTEBOOK else PYTHON_LIMIT
        data = read_bytes(path, limit)
    except SourceError as error:
        return FileOutcome.left_out(path, reason_of(error))
    if project is not None:
        project.consulted.clear()
    outcome = check_bytes(path, data, kind, selection, project)
    if project is not None:
        outcome.needs = tuple(sorted(project.consulted))
    return outcome


def check_bytes(
    path: str,
    data: bytes,
    kind: FileKind,
    selection: Selection,
    project: Project | None = None,
) -> FileOutcome:
    """Returns what came of the bytes of a file; bounded in time."""
    really = kind_of(path, data[:HEAD])
    if really in (FileKind.BINARY, FileKind.CHECKPOINT, FileKind.DATA):
        return FileOutcome.left_out(path, "it is a binary file, not Python code")
    try:
        with cpu_limit(_SECONDS), warnings.catch_warnings():
            # Python itself remarks on odd escapes while it parses; that is not our business.
            warnings.simplefilter("ignore")
            return _check(path, data, kind, selection, project)
    except SourceError as error:
        return FileOutcome.left_out(path, reason_of(error))
    except (RecursionError, MemoryError):
        return FileOutcome.left_out(path, "it is nested too deeply")
    except TooSlowError:
        return FileOutcome.left_out(path, f"it took more than {_SECONDS:.0f} s")
    except Exception as error:  # noqa: BLE001 - one file that we cannot read must not end the check
        return FileOutcome.left_out(path, failure(error))


def _check(
    path: str, data: bytes, kind: FileKind, selection: Selection, project: Project | None
) -> FileOutcome:
    if kind is FileKind.NOTEBOOK:
        from nanguard.source.notebook import Notebook

        notebook = Notebook.read(path, decode(path, data, python=False).content)
        return check_notebook(notebook, selection, project)
    text = Text(path, decode(path, data, python=True).content)
    return check_python(text, selection, project)


def check_python(text: Text, selection: Selection, project: Project | None = None) -> FileOutcome:
    """Returns what came of a text of Python code.

    Raises:
        SourceError: It is not Python.
    """
    findings, outcome = _judged(text, selection, project)
    outcome.seen = [seen_in(text, finding) for finding in findings]
    return outcome


def check_notebook(
    notebook: Notebook, selection: Selection, project: Project | None = None
) -> FileOutcome:
    """Returns what came of the code cells of a notebook.

    Raises:
        SourceError: No cell is Python.
    """
    findings, outcome = _judged(notebook.code, selection, project)
    outcome.not_checked += [
        NotChecked(notebook.path, f"{cell} is not Python: {why}", Omission.UNRELATED)
        for cell, why in notebook.broken
    ]

    def diff(fix: Fix) -> str:
        return diff_of(f"{notebook.path} (code cells)", notebook.code, fix.edits)

    for finding in findings:
        line, where = notebook.place(finding.line or 1)
        place = where if not finding.where else f"{where}, {finding.where}"
        seen = seen_in(notebook.code, finding, diff)
        moved = replace(finding, line=line, column=None, where=place)
        outcome.seen.append(replace(seen, finding=moved))
    return outcome


def _judged(
    text: Text, selection: Selection, project: Project | None
) -> tuple[list[Finding], FileOutcome]:
    """Returns what rules and comments say about Python code, with everything but the lines."""
    from nanguard.check.code.code import Code

    rules = [r for r in selection.rules("code") if selection.applies(r.code, r.name, text.path)]
    raw, failed = judge(rules, Code.parse(text, project), text.path)
    ignores = ignores_in(text, python=True)
    findings, allowed = suppress(raw, ignores)
    if ignores:
        broken = {entry.reason.split()[1] for entry in failed}
        ran = {rule.name for rule in rules} - broken
        known = {rule.name: rule.code for rule in all_rules()}
        findings += unused(text.path, ignores, known, ran, selection)
    outcome = FileOutcome(text.path, not_checked=failed, suppressed=allowed)
    return in_order(findings), outcome
