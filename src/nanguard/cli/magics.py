"""Notebooks: ``%load_ext nanguard``, then ``%%nanguard`` above a cell that trains.

The steps of the cell are guarded as those of a script are under ``nanguard run``, and bad ones are
explained below the cell. ``%nanguard check train.py`` and every other command work in a cell, too.
"""

from __future__ import annotations

import contextlib
import html
import os
import shlex
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanguard import incident as incidents
from nanguard.cli.command_line import read
from nanguard.cli.commands import BY_NAME
from nanguard.cli.incident_names import short
from nanguard.errors import MissingDependencyError, NanguardError, UsageError
from nanguard.incident import NO_BATCH
from nanguard.run.run_record import LaunchedRun, new_place
from nanguard.view.report import words
from nanguard.view.report.words import branch, entries, literal, source, text, whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from nanguard.cli.commands.during import RunOptions
    from nanguard.findings import Finding
    from nanguard.incident import Incident

_AROUND = 2  # lines of source shown on each side of the one that made the bad value
_BOX = (
    "border:1px solid #8884;border-left:4px solid #cf222e;border-radius:4px;"
    "padding:.6em .9em;margin:.5em 0"
)
_CODE = "font-family:monospace;white-space:pre;overflow-x:auto;margin:.5em 0;line-height:1.4"
_COLOURS = {"+": "color:#1a7f37", "-": "color:#cf222e"}


def load(shell: Any) -> None:
    """Adds the magics to an IPython shell.

    Args:
        shell: The shell, as IPython passes it.
    """

    def of_line(line: str) -> None:
        """Runs a command of nanguard: ``%nanguard check train.py``."""
        with _errors_shown():
            _command(shlex.split(line))

    def of_cell(line: str, cell: str) -> None:
        """Guards the steps that a cell makes, and explains bad ones below it."""
        with _errors_shown():
            _guarded_cell(shell, shlex.split(line), cell)

    shell.register_magic_function(of_line, "line", "nanguard")
    shell.register_magic_function(of_cell, "cell", "nanguard")


class IncidentCard:
    """An incident, as a notebook shows it.

    Args:
        incident: The incident.
        folder: Where it is.
    """

    def __init__(self, incident: Incident, folder: Path) -> None:
        self._incident = incident
        self._folder = folder

    def __repr__(self) -> str:
        return f"step {whole(self._incident, 'step')}: {self._sentence()}"

    def _repr_html_(self) -> str:
        return (
            f'<div style="{_BOX}"><b>Step {whole(self._incident, "step")}</b>: '
            f"{html.escape(words.symptom(branch(self._incident, 'symptom')))}. "
            f"{html.escape(words.action(self._incident))}"
            f'<div style="margin-top:.4em"><b>{html.escape(self._sentence())}</b></div>'
            f"{self._source()}{self._fix()}"
            f'<div style="opacity:.7;font-size:90%">!nanguard explain '
            f"{html.escape(shlex.quote(str(self._folder)))}</div></div>"
        )

    def _sentence(self) -> str:
        return words.sentence(self._incident) or words.symptom(branch(self._incident, "symptom"))

    def _source(self) -> str:
        origin = branch(self._incident, "origin")
        excerpt, line = branch(origin, "excerpt"), whole(origin, "line")
        first, lines = whole(excerpt, "first"), excerpt.get("lines")
        if first is None or line is None or not isinstance(lines, list):
            return ""
        shown = [
            (number, source(one))
            for number, one in enumerate(lines, start=first)
            if abs(number - line) <= _AROUND
        ]
        rows = [
            f'<span style="{"background:#cf222e22;font-weight:bold" if number == line else ""}">'
            f"{number:4} {html.escape(one)}</span>"
            for number, one in shown
        ]
        return f'<div style="{_CODE}">{"<br>".join(rows)}</div>'

    def _fix(self) -> str:
        fixes = [one for one in entries(self._incident, "fixes") if text(one, "summary")]
        if not fixes:
            return ""
        best = next((one for one in fixes if one.get("verified") is True), fixes[0])
        verdict, _ = words.fix(best)
        diff = best.get("diff")
        lines = diff.rstrip("\n").split("\n") if isinstance(diff, str) else []
        rows = [
            f'<span style="{_COLOURS.get(line[:1], "")}">{html.escape(source(line))}</span>'
            for line in lines
            if not line.startswith(("---", "+++", "@@"))
        ]
        code = f'<div style="{_CODE}">{"<br>".join(rows)}</div>' if rows else ""
        return (
            f"<div>{html.escape(text(best, 'summary'))} "
            f'<span style="{_COLOURS["+"]}">{html.escape(verdict)}</span></div>{code}'
        )


class FindingsTable:
    """Findings, as a notebook shows them.

    Args:
        findings: The findings, as the JSON of ``nanguard check`` has them.
    """

    def __init__(self, findings: list[Mapping[str, Any]]) -> None:
        self._findings = findings

    def __repr__(self) -> str:
        if not self._findings:
            return "nothing was found"
        lines = [f"{_place(one)}: {one['severity']}: {one['message']}" for one in self._findings]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        if not self._findings:
            return "nothing was found"
        rows = [
            "<tr>"
            + "".join(
                f'<td style="text-align:left">{html.escape(literal(cell, 600))}</td>'
                for cell in (_place(one), one["severity"], one["name"], one["message"], _fixes(one))
            )
            + "</tr>"
            for one in self._findings
        ]
        names = ("place", "severity", "rule", "what was found", "fix")
        head = "".join(f'<th style="text-align:left">{name}</th>' for name in names)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def table(findings: list[Finding]) -> FindingsTable:
    """Returns findings as a table for a notebook, such as those of ``nanguard.check_loader``."""
    return FindingsTable([finding.to_json() for finding in findings])


def _place(finding: Mapping[str, Any]) -> str:
    parts = [finding.get("path"), finding.get("line")]
    return ":".join(str(part) for part in parts if part is not None) or str(finding.get("where"))


def _fixes(finding: Mapping[str, Any]) -> str:
    return "; ".join(str(fix.get("title", "")) for fix in finding.get("fixes") or ())


@contextlib.contextmanager
def _errors_shown() -> Iterator[None]:
    """Shows a mistake as a message, not as a traceback."""
    try:
        yield
    except NanguardError as error:
        print(f"nanguard: {error}")  # noqa: T201 - the output of the cell


def _command(words_of: list[str]) -> None:
    """Runs a command; findings of a check become a table."""
    from nanguard.cli.entry import run

    if words_of[:1] != ["check"] or "--format" in words_of or {"-h", "--help"} & set(words_of):
        run(words_of)
        return
    import json

    with tempfile.TemporaryDirectory(prefix="nanguard-") as folder:
        report = Path(folder, "report.json")
        run([*words_of, "--format", "json", "--output", str(report)])
        _show(FindingsTable(json.loads(report.read_text(encoding="utf-8"))["findings"]))


def _guarded_cell(shell: Any, words_of: list[str], cell: str) -> None:
    options: RunOptions | None = read(BY_NAME["run"], words_of)
    if options is None:
        _command(["run", "--help"])
        return
    if options.command:
        raise UsageError(
            f"%%nanguard takes options only, and not {options.command[0]!r}.",
            where="%%nanguard",
            do="Write the code below the line; to run a script: !nanguard run -- python train.py",
        )
    name = f"cell-{shell.execution_count}.py"
    run = LaunchedRun(options.run_dir or new_place([name]), [name])
    code = 1
    try:
        with _guard(options, run.folder):
            # One line more, as the first line of the cell is the magic's.
            code_of_cell = f"\n{shell.transform_cell(cell)}"
            file = run.keep(name, code_of_cell)
            # One piece of code with a file, as a script is, so that its steps can be replayed.
            exec(compile(code_of_cell, str(file), "exec"), shell.user_ns)  # noqa: S102
        code = 0
    except SystemExit as ended:  # the guard has stopped the cell, and has said why; or its own
        code = ended.code if isinstance(ended.code, int) else 1
    finally:
        run.ended(code)
        for path in sorted(run.folder.glob(f"*/{incidents.NAME}")):
            _show(IncidentCard(incidents.read(path), short(path.parent)))


@contextlib.contextmanager
def _guard(options: RunOptions, folder: Path) -> Iterator[None]:
    """Guards the steps that are made inside."""
    try:
        from nanguard.run.live import guarding
    except ModuleNotFoundError as error:
        raise MissingDependencyError.of("%%nanguard", error) from error
    from nanguard.run.control import Options

    if options.no_batch:
        os.environ[NO_BATCH] = "1"
    with tempfile.TemporaryDirectory(prefix="nanguard-run-") as control:
        wanted = Options(
            incidents=str((options.incidents or folder).absolute()),
            control=control,
            command=(),
            folder=str(folder.absolute()),
            run_dir=str(folder.absolute()),
            on_bad=options.on_bad,
            max_bad=options.max_bad,
            spikes=options.spikes,
            trace=not options.no_trace,
            quiet=options.quiet,
            explain_seconds=options.explain_seconds,
            quarantine=options.quarantine,
        )
        with guarding(wanted):
            yield


def _show(thing: Any) -> None:
    from IPython.display import display

    display(thing)
