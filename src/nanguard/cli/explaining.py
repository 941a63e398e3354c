"""``nanguard explain`` and ``nanguard replay``: what they read and what they print."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nanguard import incident as incidents
from nanguard.errors import UsageError
from nanguard.masking import hidden_tree
from nanguard.view.report.fields import literal
from nanguard.view.report.page import cause_page, incident_page


def explain_what(what: str, *, as_json: bool) -> None:
    """Prints the page of an incident, a rule or a cause.

    Args:
        what: A folder, an ``incident.json``, the name or code of a rule, or the code of a cause.
        as_json: Whether to print JSON.
    """
    from nanguard.diagnose.cause import all_causes

    if not Path(what).exists() and _explain_rule(what, as_json=as_json):
        return
    causes = {cause.code: cause for cause in all_causes()}
    if what in causes and not Path(what).exists():
        cause = causes[what]
        if as_json:
            _print_json({"code": cause.code, "meaning": cause.meaning, "why": cause.why})
        else:
            Console().print(cause_page(cause))
        return
    if not Path(what).exists():
        raise UsageError(
            f"{what!r} is neither an incident nor the code of a cause or a rule.",
            where="nanguard explain",
            do=_meant(what, list(causes)),
        )
    incident = hidden_tree(incidents.read(Path(what)))
    if as_json:
        _print_json(incident)
    else:
        Console().print(incident_page(incident, folder=what))


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


def _meant(what: str, causes: list[str]) -> str:
    from difflib import get_close_matches

    from nanguard.cli.rulepages import pages

    near = get_close_matches(what, [*pages(), *causes], n=3)
    if near:
        return f"Did you mean {' or '.join(near)}?"
    return f"Give an incident's folder, a rule, or one of: {', '.join(causes)}."


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
        if typer.confirm("Run it?"):
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
