"""``nanguard report`` and ``nanguard serve``: runs as one page, and the pages of all runs, live."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nanguard import incident as incidents
from nanguard.check.scan import Scan
from nanguard.check.scan_check import Meter
from nanguard.cli.checking import Progress
from nanguard.cli.entry import write_output
from nanguard.cli.incident_names import incident_before, newest_run, run_named, short
from nanguard.errors import IncidentError, MissingDependencyError, UsageError
from nanguard.view.report.html import page
from nanguard.view.report.verdict import judge
from nanguard.view.report.words import in_a_line
from nanguard.view.runs import find_runs, open_run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nanguard.cli.commands.after import ReportOptions, ServeOptions
    from nanguard.view.runs import FoundRun, Run

# More curves over each other tell nothing.
_MOST_RUNS = 24
# Characters: fewer can be guessed over a network.
_SHORTEST_TOKEN = 8


def run_report(options: ReportOptions) -> None:
    """Writes the report of runs, and says where it is.

    Raises:
        NanguardError: There is nothing to report, or it cannot be written.
    """
    paths = tuple(map(run_named, options.paths)) or newest_run()
    output, png, title, quiet = options.output, options.png, options.title, options.quiet
    found = find_runs(paths)
    if len(found) > _MOST_RUNS:
        raise UsageError(
            f"there are {len(found)} runs here, too many for one page.",
            where=", ".join(map(str, paths[:5])),
            do=f"Name up to {_MOST_RUNS} of them, or look at all of them with nanguard serve.",
        )
    if output is None and png is None:
        output = Path("report.html")
    _refuse_to_overwrite(found, [path for path in (output, png) if path is not None])
    runs = _read(found, quiet=quiet)
    earlier = _earlier_incident(runs)
    if earlier:
        runs[0].problems.append(earlier)
    if output is not None:
        _write(output, page(runs, title).encode("utf-8", "backslashreplace"))
        _say(f"{output}: {_in_words(runs)}", quiet=quiet)
    if png is not None:
        from nanguard.view.report.png import picture

        _write(png, picture(runs, title))
        _say(f"{png}: {_in_words(runs)}", quiet=quiet)
    if earlier:
        _say(earlier, quiet=quiet)


def _earlier_incident(runs: Sequence[Run]) -> str:
    """Returns where the incident is that somebody may look for in a run that met none."""
    if len(runs) != 1 or runs[0].incidents:
        return ""
    folder = incident_before(Path(runs[0].path))
    if folder is None:
        return ""
    try:
        said = in_a_line(incidents.read(folder)) or f"{folder.name}"
    except IncidentError:
        return ""
    return (
        f"no incident in this run; nanguard explain {shlex.quote(str(short(folder)))} shows the "
        f"last one before it, of the run {folder.parent.name}, {said}"
    )


def _read(found: Sequence[FoundRun], *, quiet: bool) -> list[Run]:
    size = sum(path.stat().st_size for run in found for path in run.logs if path.is_file())
    with Progress(quiet=quiet) as progress:
        scan = replace(Scan(), progress=Meter(size, progress.scanned))
        runs = [open_run(one, scan) for one in found]
    for run in runs:
        judge(run)
    return runs


def _refuse_to_overwrite(found: Sequence[FoundRun], targets: Sequence[Path]) -> None:
    own = {path.resolve() for run in found for path in (*run.files(), *run.configs)}
    for target in targets:
        if target.resolve() in own:
            raise UsageError(
                "this is one of the files that are reported on.",
                where=str(target),
                do="Choose another file for the report.",
            )


def _write(path: Path, data: bytes) -> None:
    do = "Choose another file, in a folder that exists and that this user may write to."
    write_output(path, data, what="the report", do=do)


def _in_words(runs: Sequence[Run]) -> str:
    points = sum(run.points for run in runs)
    incidents = sum(len(run.incidents) for run in runs)
    findings = sum(len(run.findings) for run in runs)
    parts = [(len(runs), "run"), (points, "number"), (incidents, "incident"), (findings, "finding")]
    return ", ".join(f"{count} {word}{'' if count == 1 else 's'}" for count, word in parts)


def _say(text: str, *, quiet: bool) -> None:
    if not quiet:
        sys.stdout.write(f"{text}\n")


def serve_folder(options: ServeOptions) -> None:
    """Serves what the command line asks for."""
    run_serve(
        options.path,
        host=options.host,
        port=options.port,
        token=options.token,
        names=options.allow_host,
        browser=options.open_browser,
    )


def run_serve(
    root: Path,
    *,
    host: str,
    port: int,
    token: str | None,
    names: Sequence[str],
    browser: bool,
) -> None:
    """Serves runs until it is interrupted.

    Args:
        root: The folder.
        host: The address to listen on.
        port: The port; 0 for any that is free.
        token: The token that visitors must present.
        names: Other names by which this machine may be asked.
        browser: Whether to open a browser.

    Raises:
        NanguardError: The folder cannot be read, or the address cannot be used.
    """
    if token is not None and len(token) < _SHORTEST_TOKEN:
        raise UsageError(
            f"the token has {len(token)} characters, which can be guessed.",
            where="--token",
            do=f"Give at least {_SHORTEST_TOKEN}, or leave it out: one is made where needed.",
        )
    try:
        from nanguard.view.server.web_server import ServeSettings, serve
    except ModuleNotFoundError as error:
        raise MissingDependencyError.of("nanguard serve", error, extra="serve") from error
    serve(root, ServeSettings(host, port, token, tuple(names), browser))
