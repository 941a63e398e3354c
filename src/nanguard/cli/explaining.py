"""``nanguard explain`` and ``nanguard replay``: what they read and what they print."""

from __future__ import annotations

import json
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from nanguard import incident as incidents
from nanguard.cli.command_line import did_you_mean
from nanguard.cli.incident_names import (
    incident_named,
    incidents_in,
    incidents_named,
    is_run,
    short,
)
from nanguard.errors import UsageError
from nanguard.view.report.fields import literal
from nanguard.view.report.incident_page import cause_page, incident_page
from nanguard.view.report.words import in_a_line

if TYPE_CHECKING:
    from rich.console import RenderableType

    from nanguard.cli.commands.after import ExplainOptions, ReplayOptions


def run_explain(options: ExplainOptions) -> None:
    """Prints the page of everything that is asked about, one after the other."""
    as_json = options.form == "json"
    for place, what in enumerate(options.what or (None,)):
        if place and not as_json:
            Console().print(Rule(style="dim"), "")
        explain_what(what, as_json=as_json)


def explain_what(what: str | None, *, as_json: bool) -> None:
    """Prints the page of an incident, a rule or a cause, or the list of several incidents.

    Args:
        what: A folder, an ``incident.json``, a step, the name of a run, the name or code of a rule,
            or the code of a cause; None for the newest incident.
        as_json: Whether to print JSON.

    Raises:
        NanguardError: There is no such thing, or it cannot be read.
    """
    if what is not None and not Path(what).exists() and not what.isdecimal():
        if _explain_rule(what, as_json=as_json) or _explain_cause(what, as_json=as_json):
            return
        if not is_run(what):
            raise UsageError(
                f"{what!r} is neither an incident nor a run, a rule or a cause.",
                where="nanguard explain",
                do=did_you_mean(
                    what, _known(), "nanguard explain alone shows the newest incident of a folder."
                ),
            )
    found = incidents_named(what, "nanguard explain")
    if len(found) > 1:
        _list(found, as_json=as_json)
        return
    incident = incidents.read(found[0]).without_secrets()
    if as_json:
        _print_json(incident.to_json())
        return
    print_page(incident_page(incident, folder=str(short(found[0]))))
    if what is None:
        _print_others(found[0])


def print_page(page: RenderableType) -> None:
    """Prints a page; lines of code that are longer than the terminal is wide are not broken."""
    Console().print(page, crop=False)


def _print_others(folder: Path) -> None:
    """Says where the other incidents of a run are, if there are any."""
    others = len(incidents_in(folder.parent)) - 1
    if others > 0:
        command = f"nanguard explain {_quoted(folder.parent)}"
        more = "1 more incident" if others == 1 else f"{others} more incidents"
        Console(soft_wrap=True).print(Text(f"\n{more} of this run: {command}", style="dim"))


def _list(folders: list[Path], *, as_json: bool) -> None:
    """Prints one line for each of several incidents."""
    read = [(folder, incidents.read(folder).without_secrets()) for folder in folders]
    read.sort(key=lambda pair: (str(pair[0].parent), pair[1].get("step") or 0))
    if as_json:
        _print_json([{"folder": str(folder), **incident} for folder, incident in read])
        return
    console = Console(soft_wrap=True)
    for run in dict.fromkeys(folder.parent for folder, _ in read):
        console.print(Text(literal(str(run), 4000), style="bold"))
        for folder, incident in read:
            if folder.parent == run:
                times = incident.get("times")
                again = f" (met {times} times)" if isinstance(times, int) and times > 1 else ""
                console.print(Text(f"  {in_a_line(incident)}{again}"))
                console.print(Text(f"    nanguard explain {_quoted(folder)}", style="dim"))


def _quoted(folder: Path) -> str:
    return shlex.quote(str(short(folder)))


def _explain_cause(what: str, *, as_json: bool) -> bool:
    """Prints the page of a cause; returns whether there is one."""
    from nanguard.diagnose.cause import all_causes

    cause = next((cause for cause in all_causes() if cause.code == what), None)
    if cause is None:
        return False
    if as_json:
        _print_json({"code": cause.code, "meaning": cause.meaning, "why": cause.why})
    else:
        print_page(cause_page(cause))
    return True


def _known() -> list[str]:
    """Returns the names of everything that has a page."""
    from nanguard.cli.rulepages import pages
    from nanguard.diagnose.cause import all_causes

    return [*pages(), *(cause.code for cause in all_causes())]


def _explain_rule(what: str, *, as_json: bool) -> bool:
    """Prints the page of a rule; returns whether there is one."""
    from nanguard.cli.rulepages import find, markdown, sentence

    rule = find(what)
    if rule is None:
        return False
    if as_json:
        told = {"code": rule.code, "name": rule.name, "severity": rule.severity.value}
        _print_json({**told, "meaning": sentence(rule), "page": markdown(rule)})
        return True
    from rich.markdown import Markdown

    Console().print(Markdown(markdown(rule)))
    return True


def run_replay(options: ReplayOptions) -> int:
    """Replays what the command line asks for; returns 1 if the step was bad again."""
    bad = replay_incident(
        incident_named(options.incident, "nanguard replay"),
        precision=options.precision,
        without=options.without_sample,
        table=options.trace_all,
        explain_again=options.explain,
        seconds=options.seconds,
        as_json=options.form == "json",
        sure=options.yes,
    )
    return int(bad)


def replay_incident(
    folder: Path,
    *,
    precision: str | None,
    without: tuple[int, ...],
    table: bool,
    explain_again: bool,
    seconds: float | None,
    as_json: bool,
    sure: bool,
) -> bool:
    """Replays an incident and prints what came of it; returns whether the step was bad again."""
    from nanguard.run import again
    from nanguard.run.waiting import SignOfLife

    incident = incidents.read(folder)
    command, place = again.command_of(incident, folder)
    if not sure and not again.is_trusted(incident, folder):
        theirs = "the incident was not made by you, and to replay it means to run its command"
        _ask(theirs, command, place)
    elif not sure and not again.is_held_back():
        _ask(
            "to replay it means to run its command, and this system has no way (Landlock) to keep "
            "compiled code in it from writing files",
            command,
            place,
        )
    told = f"running {' '.join(command)} in {place} up to step {incident.get('step')}"
    sign_of_life = SignOfLife()
    show = partial(sign_of_life.show, literal(told))
    try:
        if explain_again:
            again.explain(folder, seconds=seconds, beat=show)
        else:
            answer = again.replay(
                folder,
                precision=precision,
                without=without,
                table=table,
                seconds=seconds,
                beat=show,
            )
    finally:
        sign_of_life.end()
    if explain_again:
        explain_what(str(folder), as_json=as_json)
        return False
    if as_json:
        _print_json(answer)
    else:
        _print_answer(answer)
    if "error" in answer:
        raise UsageError(
            f"the step could not be replayed: {answer['error']}.",
            where=str(folder),
            do="Look whether the command still does what it did; data or code may have changed.",
        )
    return not answer["finite"]


def _ask(why: str, command: list[str], place: Path) -> None:
    """Asks whether the command of an incident may be run here."""
    told = literal(" ".join(command), limit=1_000_000)
    if sys.stdin.isatty():
        line = f"{why[0].upper()}{why[1:]}. It would run, in {literal(str(place))}: {told}"
        Console(stderr=True).print(Text(line))
        sys.stderr.write("Run it? [y/N] ")
        sys.stderr.flush()
        if sys.stdin.readline().strip().lower() in ("y", "yes"):
            return
    raise UsageError(
        f"{why}.",
        where=told,
        do="Read the command. If you trust it, add --yes.",
    )


def _print_answer(answer: dict[str, Any]) -> None:
    console = Console()
    if answer.get("operations"):
        console.print(_operations(answer["operations"]))
    if answer.get("finite"):
        loss = "" if answer.get("loss") is None else f" (loss {answer['loss']})"
        console.print(f"step {answer['step']} is finite{loss}")
    elif "error" not in answer:
        origin = answer.get("origin") or {}
        line = f"step {answer['step']}: {answer['said']}"
        if origin:
            line += f"; it began with {origin['op']} in {origin['module']} ({origin['phase']})"
            line += f", {origin['file']}:{origin['line']}"
        console.print(Text(literal(line, limit=500)))


def _operations(rows: list[dict[str, Any]]) -> Table:
    table = Table("#", "phase", "op", "module", "line", "min", "max", "bad", box=None)
    for index, row in enumerate(rows):
        bad = row.get("nonfinite") or isinstance(row.get("min"), str)
        cells = [index, *(row.get(n) for n in ("phase", "op", "module", "line", "min", "max"))]
        texts = [Text("" if c is None else literal(_short(c))) for c in cells]
        table.add_row(*texts, Text(str(row.get("nonfinite") or "")), style="red" if bad else None)
    return table


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=1) + "\n")
