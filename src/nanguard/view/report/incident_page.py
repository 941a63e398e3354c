"""The page behind ``nanguard explain``: what happened, where, why, and what to do about it.

Incidents come from strangers. Every string of theirs is shown literally, cut to a length, and
whatever is missing or of a wrong type is left out.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Group
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from nanguard.view.report import words
from nanguard.view.report.words import (
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

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import TypeAlias

    from rich.console import Console, ConsoleOptions, RenderableType

    from nanguard.incident import Incident

    Part: TypeAlias = "RenderableType | Verbatim"

# How many lines of a diff, trials and fixes are shown, and characters of a text.
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
    incident: Incident, *, folder: str | None = None, width: int | None = None
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
    parts: list[Part] = [_headline(incident)]
    for title, body in sections.items():
        parts += [Text(), Text(title, style="bold underline"), *map(_indented, body)]
    return Trimmed(parts, width)


def cause_page(cause: Explained) -> Trimmed:
    """Returns the page of a cause."""
    return Trimmed(
        [
            Text.assemble((literal(cause.code), "bold"), f": {literal(cause.meaning, _PROSE)}"),
            Text(),
            _indented(Text(literal(cause.why, _PROSE))),
        ]
    )


def _headline(incident: Incident) -> Text:
    step, rank = whole(incident, "step"), whole(incident, "rank")
    place = "A bad step" if step is None else f"Step {step}"
    place += "" if rank is None else f", rank {rank}"
    line = Text.assemble((place, "bold"), ": ", words.symptom(branch(incident, "symptom")), ".")
    noticed = whole(branch(incident, "replay"), "noticed_at")
    if noticed is not None and noticed != step:
        line.append(f"\nIt was noticed at step {noticed}; the replay shows that it began earlier.")
    line.append(f"\n{words.action(incident)}")
    said = words.sentence(incident)
    return line.append(f"\n\n{said}", "bold") if said else line


def _where(incident: Incident) -> list[Part]:
    origin = branch(incident, "origin")
    if not origin:
        return [Text(words.no_origin(branch(incident, "replay")))]
    file, line = text(origin, "file", _PROSE), whole(origin, "line")
    place = f"{file}:{line}" if file and line is not None else file
    function = text(origin, "function")
    body: list[Part] = [
        *_facts(
            ("phase", words.phase(origin)),
            ("op", words.op(origin)),
            ("module", words.module(origin)),
            ("line", f"{place}, in {function}" if place and function else place),
        )
    ]
    lines = excerpt(origin, branch(incident, "run").get("folder"))
    return [*body, Text(), lines] if lines is not None else body


def _why(incident: Incident) -> list[Part]:
    cause = branch(incident, "cause")
    code = text(cause, "code")
    body: list[Part] = _verdict(incident, code, text(cause, "summary"))
    body += evidence(entries(incident, "evidence"))
    rows = _circumstances(incident)
    if any(value for _, value in rows):
        body += [Text(), *_facts(*rows)]
    others = [_other(other) for other in entries(incident, "other_causes")[:5]]
    if any(name for name, _ in others):
        body += [Text(), Text("Other causes that were considered:"), *_facts(*others)]
    # Only a code that cannot do harm in a shell goes into a command.
    if re.fullmatch(r"[a-z]+(-[a-z]+)+", code):
        body += [Text(), Text(f"More about this cause: nanguard explain {code}", style="dim")]
    return body


def _verdict(incident: Incident, code: str, summary: str) -> list[Part]:
    if code in ("", "unknown"):
        return [Text(f"The cause is unknown{': ' if summary else '.'}{summary}")]
    cause = Text.assemble((code, "bold"), f": {summary}" if summary else "")
    return [cause, Text(words.confidence(incident))]


def _other(cause: dict[str, Any]) -> tuple[str, str]:
    code, summary = text(cause, "code"), text(cause, "summary")
    sure = words.sureness(cause.get("confidence"))
    return code, f"{sure}{': ' if summary else ''}{summary}"


def _circumstances(incident: Incident) -> list[tuple[str, str]]:
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


def _tried(incident: Incident) -> list[Part]:
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


def _to_do(incident: Incident) -> list[Part]:
    fixes = [fix for fix in entries(incident, "fixes") if text(fix, "summary")]
    if not fixes:
        return [Text(words.no_fix(branch(incident, "replay")))]
    fixes.sort(key=lambda fix: fix.get("verified") is not True)
    body: list[Part] = []
    for place, fix in enumerate(fixes[:_FIXES], start=1):
        verdict, style = words.fix(fix)
        lines = [Text(text(fix, "summary"), style="bold"), Text(verdict, style=style)]
        table = Table.grid(padding=(0, 1))
        table.add_row(Text(f"{place}."), Group(*lines))
        body += [*([] if place == 1 else [Text()]), table, *_diff(fix.get("diff"))]
    return body + _more(fixes, _FIXES)


def _diff(diff: Any) -> list[Part]:
    if not isinstance(diff, str) or not diff.strip():
        return []
    lines = diff.rstrip("\n").split("\n")
    shown = [Text(source(line), style=words.diff_style(line)) for line in lines[:_DIFF_LINES]]
    return [Verbatim(shown, indent=7), *map(_indented, _more(lines, _DIFF_LINES))]


def _replay(incident: Incident, folder: str | None) -> list[Part]:
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
        *_facts(
            ("command", " ".join(shlex.quote(word) for word in texts(run, "command")[:20])),
            ("versions", ", ".join(versions)),
        ),
        Text(),
        Text("To find out why:" if unexplained else "To look again:"),
        Verbatim(
            [Text(f"nanguard replay {'--explain ' if unexplained else ''}{again}", style="bold")],
            indent=2,
        ),
    ]


def _facts(*rows: tuple[str, str]) -> list[Part]:
    """Returns facts below each other; a command or a place, which people copy, stays one line."""
    known = [(name, value) for name, value in rows if name and value]
    wide = max((len(name) for name, _ in known), default=0)
    body: list[Part] = []
    for name, value in known:
        if name in _COPIED:
            line = Text.assemble((f"{name:{wide}}", "dim"), f"  {value}")
            body.append(Verbatim([line], indent=2))
            continue
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True, min_width=wide)
        table.add_column(overflow="fold")
        table.add_row(Text(name, style="dim"), Text(value))
        body.append(table)
    return body


# Facts that are copied from the page.
_COPIED = ("line", "command")


def _more(of: Sequence[Any], shown: int) -> list[Part]:
    return [Text(f"... and {len(of) - shown} more", style="dim")] if len(of) > shown else []


def _indented(body: Part) -> Part:
    return body if isinstance(body, Verbatim) else Padding(body, (0, 0, 0, 2))


# Pieces of evidence that are shown.
_MOST_EVIDENCE = 8
_COLUMNS = ("shape", "dtype", "min", "max", "zeros", "nonfinite", "nan", "inf", "-inf")
# They say what ``nonfinite`` is made of, and are in the way where there is nothing of the kind.
_KINDS = ("nan", "inf", "-inf")


def evidence(found: Sequence[Mapping[str, Any]]) -> list[RenderableType]:
    """Returns the numbers: what a tensor holds in a table, anything else below it."""
    shown = [entry for entry in found if text(entry, "what")][:_MOST_EVIDENCE]
    columns = [name for name in _COLUMNS if any(_counts(entry, name) for entry in shown)]
    body: list[RenderableType] = []
    rows = [entry for entry in shown if any(_value(entry, name) for name in columns)]
    if rows:
        body += [Text(), _table(rows, columns)]
    lines = [line for entry in shown if (line := _line(entry))]
    return [*body, Text(), *lines] if lines else body


def _counts(entry: Mapping[str, Any], name: str) -> bool:
    value = _value(entry, name)
    return bool(value) and not (name in _KINDS and value == "0")


def _table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(Text("what"), overflow="fold")
    for name in columns:
        words = name in ("shape", "dtype")
        header = "not finite" if name == "nonfinite" else name
        table.add_column(Text(header), justify="left" if words else "right", overflow="fold")
    for entry in rows:
        table.add_row(Text(text(entry, "what")), *(Text(_value(entry, name)) for name in columns))
    return table


def _line(entry: Mapping[str, Any]) -> Text | None:
    """Returns what the table has no column for."""
    parts = [
        f"{name} {value}"
        for key in list(entry)[:20]
        if key not in (*_COLUMNS, "what")
        and (name := literal(key, 40))
        and (value := _value(entry, key))
    ]
    return Text(f"{text(entry, 'what')}: {', '.join(parts)}") if parts else None


def _value(entry: Mapping[str, Any], key: str) -> str:
    value = entry.get(key)
    if isinstance(value, list):
        words = numbers(entry, key)
        return "x".join(words[:8]) or "scalar" if key == "shape" else listed(words, 8)
    return number(value) or literal(value, 40)


# Lines of source around the one of the origin, in files up to this size in bytes.
_LINES_AROUND = 3
_LARGEST_FILE = 4 << 20


def excerpt(origin: Mapping[str, Any], folder: Any) -> Verbatim | None:
    """Returns the source at an origin; only its own line if no more is known to be true.

    Args:
        origin: The origin, as an incident holds it.
        folder: Where the run was started, for a file without a full path.
    """
    line = whole(origin, "line")
    if line is None:
        return _alone(origin)
    kept = branch(origin, "excerpt")
    first, lines = whole(kept, "first"), kept.get("lines")
    if first is None or not isinstance(lines, list) or not first <= line < first + len(lines):
        first, lines = 1, _on_disk(origin, line, folder)
    return _numbered(first, lines, line) if lines else _alone(origin)


def _alone(origin: Mapping[str, Any]) -> Verbatim | None:
    code = text(origin, "code")
    return Verbatim([Text(f"-> {code}")], indent=2) if code else None


def _on_disk(origin: Mapping[str, Any], line: int, folder: Any) -> list[str]:
    """Returns the lines of the file, if it is still the one that ran."""
    file, code = origin.get("file"), origin.get("code")
    if not isinstance(file, str) or not isinstance(code, str) or not code.strip():
        return []
    try:
        path = Path(folder if isinstance(folder, str) else "", file)
        # Nothing but source: a stranger could name a file with secrets, or one that never ends.
        if path.suffix != ".py" or not path.is_file() or path.stat().st_size > _LARGEST_FILE:
            return []
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except (OSError, ValueError):
        return []
    same = 1 <= line <= len(lines) and lines[line - 1].strip() == code.strip()
    return lines if same else []


def _numbered(first: int, lines: list[Any], line: int) -> Verbatim:
    begin = max(first, line - _LINES_AROUND)
    end = min(first + len(lines) - 1, line + _LINES_AROUND)
    shown = []
    for at in range(begin, end + 1):
        here = at == line
        mark = f"{'->' if here else '  '} {at:>{len(str(end))}} | "
        code = source(lines[at - first])
        shown.append(Text.assemble((mark, "" if here else "dim"), (code, "bold" if here else "")))
    return Verbatim(shown, indent=2)


class Verbatim:
    """Lines of code, which are never broken: a line that is too long is the terminal's to fold.

    Args:
        lines: The lines.
        indent: How many blanks stand before each.
    """

    def __init__(self, lines: Sequence[Text], indent: int = 0) -> None:
        self._lines = lines
        self._before = " " * indent

    def segments(self, console: Console) -> Iterator[Segment]:
        """Yields the lines as they are."""
        for line in self._lines:
            style = console.get_style(line.style, default="")
            code = Segment.apply_style(line.render(console), style)
            yield from _trimmed([Segment(self._before), *code])
            yield Segment.line()


class Trimmed:
    """Shows parts one below the other, without the blanks that rich fills lines up with.

    Args:
        parts: The parts; those that are ``Verbatim`` keep their lines.
        width: How wide the others may be; as wide as the terminal if None.
    """

    def __init__(
        self, parts: Sequence[RenderableType | Verbatim], width: int | None = None
    ) -> None:
        self._parts = parts
        self._width = width

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        width = options.max_width if self._width is None else min(self._width, options.max_width)
        narrow = options.update(width=width)
        for part in self._parts:
            if isinstance(part, Verbatim):
                yield from part.segments(console)
                continue
            for line in console.render_lines(part, narrow, pad=False):
                yield from _trimmed(line)
                yield Segment.line()


def _trimmed(line: Iterable[Segment]) -> list[Segment]:
    kept = list(line)
    while kept and not kept[-1].text.rstrip():
        kept.pop()
    if kept:
        last = kept[-1]
        kept[-1] = Segment(last.text.rstrip(), last.style, last.control)
    return kept
