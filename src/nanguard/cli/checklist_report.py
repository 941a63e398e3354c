"""``nanguard check --checklist``: the points of the checklist, answered for a project."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from itertools import groupby
from typing import TYPE_CHECKING

from nanguard.advice.checklist import fill_in
from nanguard.advice.checklist_points import PointVerdict
from nanguard.errors import UsageError
from nanguard.view.report.words import literal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.advice.checklist import Checklist
    from nanguard.advice.checklist_points import Answer, TracePlace
    from nanguard.check.engine import Check
    from nanguard.cli.commands.before import CheckOptions

_STYLES = {PointVerdict.YES: "32", PointVerdict.NO: "1;31", PointVerdict.UNKNOWN: "33"}
# Columns that a verdict takes.
_MARGIN = 15
_SHOWN = {PointVerdict.YES: 1, PointVerdict.NO: 3, PointVerdict.UNKNOWN: 0}


def checklist_as_json(checklist: Checklist) -> str:
    """Returns a checklist as one JSON object."""
    return json.dumps(checklist.to_json(), indent=1) + "\n"


def checklist_as_text(checklist: Checklist, *, colour: bool = False, width: int = 100) -> str:
    """Returns a checklist section by section, with the place of every answer.

    Args:
        checklist: The checklist.
        colour: Whether to use colour.
        width: How wide the terminal is.
    """
    lines: list[str] = []
    for section, answers in groupby(checklist.answers, key=lambda answer: answer.point.section):
        lines.append(_styled(section, "1;4", colour=colour))
        for answer in answers:
            lines += _answer(answer, colour=colour, width=width)
        lines.append("")
    if checklist.not_checked:
        lines.append(_styled("not checked", "1;4", colour=colour))
        for entry in checklist.not_checked[:20]:
            lines.append(f"  {literal(entry.path)}: {literal(entry.reason, 300)}")
        hidden = len(checklist.not_checked) - 20
        lines += [f"  and {hidden} more"] if hidden > 0 else []
        lines.append("")
    return "\n".join([*lines, _summary(checklist)]) + "\n"


def _answer(answer: Answer, *, colour: bool, width: int) -> Iterator[str]:
    word = answer.verdict.value.ljust(_MARGIN - 2)
    word = _styled(word, _STYLES[answer.verdict], colour=colour)
    yield f"  {word}{answer.point.question} [{answer.point.name}]"
    shown = answer.places[: _SHOWN[answer.verdict]]
    for what, places in groupby(shown, key=lambda place: place.what):
        where = ", ".join(_where(place) for place in places)
        yield from _wrapped(f"{where}: {literal(what, 300)}", width)
    others = answer.more + len(answer.places) - len(shown)
    if others:
        yield from _wrapped(f"and {others} more", width)
    if answer.verdict is not PointVerdict.YES:
        yield from _wrapped(f"do: {answer.point.advice}", width)


def _where(place: TracePlace) -> str:
    return literal(place.path if place.line is None else f"{place.path}:{place.line}", 300)


def _wrapped(text: str, width: int) -> list[str]:
    margin = " " * _MARGIN
    return textwrap.wrap(
        text,
        max(40, width),
        initial_indent=margin,
        subsequent_indent=margin + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _summary(checklist: Checklist) -> str:
    counts = ", ".join(f"{checklist.count(verdict)} {verdict.value}" for verdict in PointVerdict)
    files = len(checklist.checked)
    return f"{counts}; {files} {'file' if files == 1 else 'files'} checked"


def _styled(text: str, style: str, *, colour: bool) -> str:
    return f"\x1b[{style}m{text}\x1b[0m" if colour else text


def refuse_what_a_checklist_has_not(asked: CheckOptions) -> None:
    """Stops where options are given that a checklist cannot follow.

    Raises:
        UsageError: There are such options.
    """
    if asked.form not in ("text", "json"):
        raise UsageError(
            f"a checklist has no format {asked.form!r}.",
            where="nanguard check --checklist",
            do="Give --format text or --format json.",
        )
    if asked.fix or asked.diff or asked.write_baseline is not None:
        raise UsageError(
            "a checklist repairs nothing and writes no baseline.",
            where="nanguard check --checklist",
            do="Run nanguard check once with --checklist and once without.",
        )


def answered(asked: CheckOptions, check: Check, fail_on: str) -> tuple[str, int]:
    """Returns the checklist as it is printed, and the exit code: 1 if any answer is no.

    Args:
        asked: What the command line says.
        check: A check that has run.
        fail_on: From which severity on a check fails; none for never.
    """
    checklist = fill_in(check, asked.paths)
    failed = fail_on != "none" and checklist.count(PointVerdict.NO) > 0
    if asked.form == "json":
        return checklist_as_json(checklist), int(failed)
    plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    colour = asked.output is None and sys.stdout.isatty() and not plain
    width = shutil.get_terminal_size((100, 25)).columns
    return checklist_as_text(checklist, colour=colour, width=width), int(failed)
