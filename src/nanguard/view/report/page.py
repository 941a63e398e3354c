"""The page behind ``nanguard explain``: what happened, where, why, and what to do about it.

Incidents come from strangers. Every string of theirs is shown literally, cut to a length, and
whatever is missing or of a wrong type is left out.
"""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from nanguard.view.report import words
from nanguard.view.report.evidence import evidence
from nanguard.view.report.excerpt import excerpt
from nanguard.view.report.fields import (
    branch,
    entries,
    listed,
    literal,
    number,
    numbers,
    source,
    text,
    texts,
    whole,
)
from nanguard.view.report.trimmed import Trimmed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

_DIFF_LINES = 40
_TRIALS = 20
_FIXES = 6
_PROSE = 4000


class Explained(Protocol):
    """A cause, as far as its page goes."""

    code: str
    meaning: str
    why: str


def incident_page(
    incident: dict[str, Any], *, folder: str | None = None, width: int | None = None
) -> Trimmed:
    """Returns the page of an incident.

    Args:
        incident: The incident, as its file holds it.
        folder: Where it lies, for the command that looks again.
        width: How wide the page may be; as wide as the terminal if None.
    """
    sections = {
        "Where": _where(incident),
        "Why": _why(incident),
        "What was tried": _tried(incident),
        "What to do": _to_do(incident),
        "Replay": _replay(incident, folder),
    }
    parts: list[RenderableType] = [_headline(incident)]
    for title, body in sections.items():
        parts += [Text(), Text(title, style="bold underline"), _indented(Group(*body))]
    return Trimmed(Group(*parts), width)


def cause_page(cause: Explained) -> Trimmed:
    """Returns the page of a cause."""
    return Trimmed(
        Group(
            Text.assemble((literal(cause.code), "bold"), f": {literal(cause.meaning, _PROSE)}"),
            Text(),
            _indented(Text(literal(cause.why, _PROSE))),
        )
    )


def _headline(incident: dict[str, Any]) -> Text:
    step, rank = whole(incident, "step"), whole(incident, "rank")
    place = "A bad step" if step is None else f"Step {step}"
    place += "" if rank is None else f", rank {rank}"
    line = Text.assemble((place, "bold"), ": ", words.symptom(branch(incident, "symptom")), ".")
    noticed = whole(branch(incident, "replay"), "noticed_at")
    if noticed is not None and noticed != step:
        line.append(f"\nIt was noticed at step {noticed}; the replay shows that it began earlier.")
    line.append(f"\n{words.action(branch(incident, 'action'))}")
    said = words.sentence(incident)
    return line.append(f"\n\n{said}", "bold") if said else line


def _where(incident: dict[str, Any]) -> list[RenderableType]:
    origin = branch(incident, "origin")
    if not origin:
        return [Text(words.no_origin(branch(incident, "replay")))]
    file, line = text(origin, "file", _PROSE), whole(origin, "line")
    place = f"{file}:{line}" if file and line is not None else file
    function = text(origin, "function")
    body: list[RenderableType] = [
        _facts(
            ("phase", words.phase(origin)),
            ("op", words.op(origin)),
            ("module", words.module(origin)),
            ("line", f"{place}, in {function}" if place and function else place),
        )
    ]
    lines = excerpt(origin, branch(incident, "run").get("folder"))
    return [*body, Text(), lines] if lines is not None else body


def _why(incident: dict[str, Any]) -> list[RenderableType]:
    cause = branch(incident, "cause")
    code = text(cause, "code")
    body: list[RenderableType] = _verdict(incident, code, text(cause, "summary"))
    body += evidence(entries(incident, "evidence"))
    rows = _circumstances(incident)
    if any(value for _, value in rows):
        body += [Text(), _facts(*rows)]
    others = [_other(other) for other in entries(incident, "other_causes")[:5]]
    if any(name for name, _ in others):
        body += [Text(), Text("Other causes that were considered:"), _facts(*others)]
    # Only a code that cannot do harm in a shell goes into a command.
    if re.fullmatch(r"[a-z]+(-[a-z]+)+", code):
        body += [Text(), Text(f"More about this cause: nanguard explain {code}", style="dim")]
    return body


def _verdict(incident: dict[str, Any], code: str, summary: str) -> list[RenderableType]:
    if code in ("", "unknown"):
        return [Text(f"The cause is unknown{': ' if summary else '.'}{summary}")]
    cause = Text.assemble((code, "bold"), f": {summary}" if summary else "")
    return [cause, Text(words.confidence(incident))]


def _other(cause: dict[str, Any]) -> tuple[str, str]:
    code, summary = text(cause, "code"), text(cause, "summary")
    sure = words.sureness(cause.get("confidence"))
    return code, f"{sure}{': ' if summary else ''}{summary}"


def _circumstances(incident: dict[str, Any]) -> list[tuple[str, str]]:
    symptom, size = branch(incident, "symptom"), whole(incident, "batch_size")
    samples = listed(numbers(incident, "samples"))
    of = "" if size is None else f" (of {size} in the batch, counted from 0)"
    terms = [
        f"{name} {value}"
        for key, entry in branch(symptom, "terms").items()
        if (name := literal(key, 60)) and (value := number(entry))
    ]
    return [
        ("samples", f"{samples}{of}" if samples else ""),
        ("dataset index", listed(numbers(incident, "dataset_indices"))),
        ("loss terms", listed(terms)),
        ("times met", number(whole(incident, "times"))),
        ("drift", words.drift(incident)),
        ("losses before", listed(numbers(incident, "losses_before")[-5:])),
        ("loss scale", number(symptom.get("loss_scale"))),
        ("autocast", text(incident, "autocast")),
        ("optimizer", words.optimizer(branch(incident, "optimizer"))),
        ("notes", listed(texts(incident, "notes"), 5)),
    ]


def _tried(incident: dict[str, Any]) -> list[RenderableType]:
    trials = entries(incident, "trials")
    if not trials:
        return [Text("Nothing.")]
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for trial in trials[:_TRIALS]:
        verdict, style = words.trial(trial.get("finite"))
        result = text(trial, "result").removeprefix("could not be tried: ")
        what = Text(text(trial, "what"))
        table.add_row(
            Text(verdict, style=style), what.append(f"\n{result}" if result else "", "dim")
        )
    return [Text("The same step again, with one thing changed:"), table, *_more(trials, _TRIALS)]


def _to_do(incident: dict[str, Any]) -> list[RenderableType]:
    fixes = [fix for fix in entries(incident, "fixes") if text(fix, "summary")]
    if not fixes:
        return [Text(words.no_fix(branch(incident, "replay")))]
    fixes.sort(key=lambda fix: fix.get("verified") is not True)
    body: list[RenderableType] = []
    for place, fix in enumerate(fixes[:_FIXES], start=1):
        verdict, style = words.fix(fix)
        lines = [Text(text(fix, "summary"), style="bold"), Text(verdict, style=style)]
        table = Table.grid(padding=(0, 1))
        table.add_row(Text(f"{place}."), Group(*lines, *_diff(fix.get("diff"))))
        body += [table] if place == 1 else [Text(), table]
    return body + _more(fixes, _FIXES)


def _diff(diff: Any) -> list[RenderableType]:
    if not isinstance(diff, str) or not diff.strip():
        return []
    lines = diff.rstrip("\n").split("\n")
    shown = [
        Text(source(line), style=words.diff_style(line), overflow="fold")
        for line in lines[:_DIFF_LINES]
    ]
    return [_indented(Group(*shown, *_more(lines, _DIFF_LINES)))]


def _replay(incident: dict[str, Any], folder: str | None) -> list[RenderableType]:
    run = branch(incident, "run")
    versions = [
        f"{name} {version}"
        for name in ("nanguard", "torch", "python", "device", "platform")
        if (version := text(run, name, 80))
    ]
    unexplained = text(branch(incident, "replay"), "verdict") == "not-replayed"
    # Cut, it would be another command.
    again = "FOLDER" if folder is None else literal(shlex.quote(folder), _PROSE)
    return [
        Text(words.replay(branch(incident, "replay"))),
        _facts(
            ("command", " ".join(shlex.quote(word) for word in texts(run, "command")[:20])),
            ("versions", ", ".join(versions)),
        ),
        Text(),
        Text("To find out why:" if unexplained else "To look again:"),
        Text(
            f"nanguard replay {'--explain ' if unexplained else ''}{again}",
            style="bold",
            overflow="fold",
        ),
    ]


def _facts(*rows: tuple[str, str]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        if name and value:
            table.add_row(Text(name, style="dim"), Text(value))
    return table


def _more(of: Sequence[Any], shown: int) -> list[RenderableType]:
    return [Text(f"... and {len(of) - shown} more", style="dim")] if len(of) > shown else []


def _indented(body: RenderableType) -> Padding:
    return Padding(body, (0, 0, 0, 2))
