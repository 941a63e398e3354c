"""What is done after a bad step, and with what a run leaves behind."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import Annotated

import typer

from nanguard.cli.choices import Format, Precision
from nanguard.cli.commands.app import app


@app.command(
    epilog="Examples:\n\n- `nanguard explain .nanguard/incidents/20261115-031500/step-000007-rank0`"
    "\n\n- `nanguard explain clip-before-unscale`\n\n- `nanguard explain division-by-zero`",
)
def explain(
    what: Annotated[str, typer.Argument(help="An incident's folder, a rule, or a cause.")],
    form: Annotated[Format, typer.Option("--format", help="How to answer.")] = Format.TEXT,
) -> None:
    """Say what happened in an incident, or what a rule or a cause stands for."""
    from nanguard.cli.explaining import explain_what

    explain_what(what, as_json=form is Format.JSON)


@app.command(
    epilog="Examples:\n\n- `nanguard replay runs/7/step-000007-rank0 --precision float64`\n\n"
    "- `nanguard replay runs/7/step-000007-rank0 --without-sample 3 --trace-all`\n\n"
    "- `nanguard replay --explain runs/7/step-000007-rank0`",
)
def replay(
    incident: Annotated[Path, typer.Argument(help="The incident's folder.")],
    precision: Annotated[
        Precision | None, typer.Option(help="Compute everything in this type.")
    ] = None,
    without_sample: Annotated[
        list[int] | None, typer.Option(help="Replace this sample of the batch by a good one.")
    ] = None,
    trace_all: Annotated[  # noqa: FBT002
        bool, typer.Option("--trace-all", help="Show every operation of the step.")
    ] = False,
    explain_again: Annotated[  # noqa: FBT002
        bool, typer.Option("--explain", help="Find out the cause, and complete the incident.")
    ] = False,
    seconds: Annotated[
        float | None,
        typer.Option(
            "--explain-seconds",
            "--seconds",
            min=1,
            help="How long it may take; by default this follows the time the run took up to the "
            "step and the load of the machine.",
        ),
    ] = None,
    yes: Annotated[  # noqa: FBT002
        bool, typer.Option("--yes", help="Run the command even if somebody else made the incident.")
    ] = False,
    form: Annotated[Format, typer.Option("--format", help="How to answer.")] = Format.TEXT,
) -> None:
    """Run the step of an incident again, from its folder alone.

    The command of the run is started once more, with the same arguments in the same folder, and
    goes up to the step that was bad. It prints nothing and writes no file while it does. An
    incident that somebody else made is only replayed if you say so, as its command is run. The
    exit code is 1 if the step is bad again.
    """
    from nanguard.cli.explaining import replay_incident

    bad = replay_incident(
        incident,
        precision=None if precision is None else precision.value,
        without=tuple(without_sample or ()),
        table=trace_all,
        explain_again=explain_again,
        seconds=seconds,
        as_json=form is Format.JSON,
        sure=yes,
    )
    raise typer.Exit(1 if bad else 0)


@app.command(
    epilog="Examples:\n\n- `nanguard fix`\n\n"
    "- `nanguard fix .nanguard/incidents/20261115-031500/step-000007-rank0`\n\n"
    "- `nanguard fix --dry-run`",
)
def fix(
    incident: Annotated[
        Path | None,
        typer.Argument(help="The incident's folder; the newest one of this folder if not given."),
    ] = None,
    dry_run: Annotated[  # noqa: FBT002
        bool, typer.Option("--dry-run", help="Show the change, and write nothing.")
    ] = False,
    yes: Annotated[  # noqa: FBT002
        bool, typer.Option("--yes", help="Change files even if somebody else made the incident.")
    ] = False,
) -> None:
    """Apply the change that the replay of an incident has verified.

    The first verified change of the incident is made to your file, and the command to go on with
    is printed. A file that has changed since the change was tried is left alone.
    """
    from nanguard.cli.patching import fix_incident

    fix_incident(incident, sure=yes, dry_run=dry_run)


@app.command(
    epilog="Examples:\n\n- `nanguard report runs/night -o report.html`\n\n"
    "- `nanguard report train.log .nanguard/incidents/20261115-151552`\n\n"
    "- `nanguard report runs/a runs/b --png curves.png`",
)
def report(
    paths: Annotated[
        list[str],
        typer.Argument(help="Run folders, logs, incidents, and JSON reports of nanguard check."),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The page to write; report.html by default."),
    ] = None,
    png: Annotated[
        Path | None, typer.Option(help="Write a plain picture of the curves to this file.")
    ] = None,
    title: Annotated[str | None, typer.Option(help="What the page is called.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing.")] = False,  # noqa: FBT002
) -> None:
    """Write one page about runs: curves, incidents, findings and a verdict.

    The page is a single file that opens offline and asks the network for nothing. Several runs are
    laid over each other or side by side.
    """
    from nanguard.cli.reporting import run_report

    run_report(paths, output=output, png=png, title=title, quiet=quiet)


@app.command(
    epilog="Examples:\n\n- `nanguard serve runs`\n\n- `nanguard serve runs --port 0 --open`\n\n"
    "- `nanguard serve runs --host 0.0.0.0`",
)
def serve(
    path: Annotated[Path, typer.Argument(help="A folder with runs below it.")],
    host: Annotated[
        str, typer.Option(help="The address to listen on; others than this machine need a token.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The port; 0 for any that is free.")
    ] = 6116,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="NANGUARD_TOKEN",
            help="What has to be known to look; made up and printed where it is needed.",
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="Another name by which this machine is asked. May be repeated."),
    ] = None,
    open_browser: Annotated[bool, typer.Option("--open", help="Open a browser.")] = False,  # noqa: FBT002
) -> None:
    """Show all runs below a folder, live, in a browser.

    An overview of all runs, and a page for each that updates as its files grow. Nothing is
    written. Ctrl-C ends it.
    """
    from nanguard.cli.serving import run_serve

    run_serve(path, host=host, port=port, token=token, names=allow_host or (), browser=open_browser)
