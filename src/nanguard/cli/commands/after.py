"""What is done after a bad step, and with what a run leaves behind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nanguard.cli.command_line import argument, flag, option

FORMATS = ("text", "json")
NEWEST = "The newest incident of this folder by default."


@dataclass(frozen=True, slots=True)
class ExplainOptions:
    """Say what happened in an incident, or what a rule or a cause stands for.

    Without an argument, the newest incident of this folder is explained. A number is a step. A
    folder with several incidents, such as a run's, is listed.
    """

    what: tuple[str, ...] = argument(
        "WHAT",
        f"Incidents, steps, runs, rules or causes. {NEWEST}",
        many=True,
        default=(),
        completes="incidents",
    )
    form: str = option(
        "--format", metavar="FORMAT", default="text", choices=FORMATS, help="Output format."
    )


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Run the command of an incident again, up to its bad step.

    It is started once more with the same arguments in the same folder, which takes as long as the
    run took up to there. It prints nothing and writes no file while it does. An
    incident that somebody else made is only replayed if you say so, as its command is run. The
    exit code is 1 if the step is bad again.
    """

    incident: str | None = argument(
        "INCIDENT",
        f"An incident's folder, or a step. {NEWEST}",
        default=None,
        completes="incidents",
    )
    precision: str | None = option(
        "--precision",
        metavar="TYPE",
        choices=("float32", "float64"),
        help="Compute everything in this type.",
    )
    without_sample: tuple[int, ...] = option(
        "--without-sample",
        metavar="SAMPLE",
        kind=int,
        many=True,
        help="Replace this sample of the batch by a good one.",
    )
    trace_all: bool = flag("--trace-all", help="Show every operation of the step.")
    explain: bool = flag("--explain", help="Find out the cause, and complete the incident.")
    seconds: float | None = option(
        "--explain-seconds",
        "--seconds",
        metavar="SECONDS",
        kind=float,
        least=1,
        help="How long it may take; by default this follows the time the run took up to the step "
        "and the load of the machine.",
    )
    yes: bool = flag("--yes", "-y", help="Run the command even if somebody else made the incident.")
    form: str = option(
        "--format", metavar="FORMAT", default="text", choices=FORMATS, help="Output format."
    )


@dataclass(frozen=True, slots=True)
class FixOptions:
    """Apply the change that the replay of an incident has verified.

    The first verified change of the incident is made to your file, and the command to go on with
    is printed. A file that has changed since the change was tried is left alone.
    """

    incident: str | None = argument(
        "INCIDENT",
        f"An incident's folder, or a step. {NEWEST}",
        default=None,
        completes="incidents",
    )
    dry_run: bool = flag("--dry-run", "-n", help="Show the change, and write nothing.")
    yes: bool = flag("--yes", "-y", help="Change files even if somebody else made the incident.")


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """Write one page about runs: curves, incidents, findings and a verdict.

    The page is a single file that opens offline and loads nothing from the network. Several runs
    are laid over each other or side by side.
    """

    paths: tuple[str, ...] = argument(
        "PATH",
        "Run folders, logs, incidents, and JSON reports of nanguard check. The newest run of this "
        "folder by default.",
        many=True,
        default=(),
        completes="files",
    )
    output: Path | None = option(
        "--output",
        "-o",
        metavar="FILE",
        kind=Path,
        completes="files",
        help="The page to write; report.html by default.",
    )
    png: Path | None = option(
        "--png",
        metavar="FILE",
        kind=Path,
        completes="files",
        help="Write a plain picture of the curves to this file.",
    )
    title: str | None = option("--title", metavar="TEXT", help="The title of the page.")
    quiet: bool = flag("--quiet", "-q", help="Print nothing.")


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Show all runs below a folder, live, in a browser.

    An overview of all runs, and a page for each that updates as its files grow. Nothing is
    written. Ctrl-C ends it.
    """

    path: Path = argument(
        "DIR",
        "A folder with runs below it. This folder by default.",
        kind=Path,
        default=Path(),
        completes="folders",
    )
    host: str = option(
        "--host",
        metavar="ADDRESS",
        default="127.0.0.1",
        help="The address to listen on; addresses that other machines can reach need a token.",
    )
    port: int = option(
        "--port",
        metavar="PORT",
        kind=int,
        least=0,
        most=65535,
        default=6116,
        help="The port; 0 for any that is free.",
    )
    token: str | None = option(
        "--token",
        metavar="TOKEN",
        env="NANGUARD_TOKEN",
        help="The token that visitors must present; one is generated and printed where needed.",
    )
    allow_host: tuple[str, ...] = option(
        "--allow-host",
        metavar="NAME",
        many=True,
        help="Another name under which browsers reach this machine.",
    )
    open_browser: bool = flag("--open", help="Open a browser.")
