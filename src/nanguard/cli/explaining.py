"""``nanguard explain``, ``replay`` and ``fix``: what happened, the step again, the verified fix.

The diff that ``fix`` applies comes out of an incident, which a stranger may have written. It is
applied only to a Python file below the folder that the command ran in, only if that file is what it
was when the change was tried, and an incident that this user did not make needs consent.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import shlex
import sys
import tokenize
from dataclasses import dataclass
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
    is_known,
    names,
    newest_incidents,
    short,
)
from nanguard.errors import IncidentError, UsageError
from nanguard.run.run_record import is_ours
from nanguard.source.text import write_atomically
from nanguard.view.report import words
from nanguard.view.report.incident_page import cause_page, incident_page
from nanguard.view.report.words import branch, entries, in_a_line, literal, source, text, texts

if TYPE_CHECKING:
    from rich.console import RenderableType

    from nanguard.cli.commands.after import ExplainOptions, FixOptions, ReplayOptions
    from nanguard.incident import Incident

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,\d+)? @@")
_COMMAND = "nanguard fix"

# Bytes of a script that are looked through.
_SCRIPT = 1 << 20


def run_explain(options: ExplainOptions) -> None:
    """Prints the page of each thing that was named, one after the other."""
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
        if not is_known(what):
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

    return [*names(), *pages(), *(cause.code for cause in all_causes())]


def _explain_rule(what: str, *, as_json: bool) -> bool:
    """Prints the page of a rule; returns whether there is one."""
    from nanguard.cli.rulepages import find, markdown, sentence

    rule = find(what)
    if rule is None:
        return False
    if as_json:
        fields = {"code": rule.code, "name": rule.name, "severity": rule.severity.value}
        _print_json({**fields, "meaning": sentence(rule), "page": markdown(rule)})
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
        theirs = "the incident was not made by you, and replaying it means running its command"
        _ask(theirs, command, place)
    elif not sure and not again.is_held_back():
        _ask(
            "replaying it means running its command, and this system has no Landlock to keep "
            "compiled code in it from writing files",
            command,
            place,
        )
    task = f"running {' '.join(command)} in {place} up to step {incident.get('step')}"
    sign_of_life = SignOfLife()
    show = partial(sign_of_life.show, literal(task))
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
    shown = literal(" ".join(command), limit=1_000_000)
    if sys.stdin.isatty():
        line = f"{why[0].upper()}{why[1:]}. It would run, in {literal(str(place))}: {shown}"
        Console(stderr=True).print(Text(line))
        sys.stderr.write("Run it? [y/N] ")
        sys.stderr.flush()
        if sys.stdin.readline().strip().lower() in ("y", "yes"):
            return
    raise UsageError(
        f"{why}.",
        where=shown,
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


def run_fix(options: FixOptions) -> None:
    """Makes the change that the command line asks for."""
    named = options.incident
    folder = None if named is None else incident_named(named, _COMMAND)
    fix_incident(folder, sure=options.yes, dry_run=options.dry_run)


def fix_incident(folder: Path | None, *, sure: bool, dry_run: bool) -> None:
    """Applies the first verified change of an incident, and prints what it did.

    Args:
        folder: The incident; None for the newest below ``.nanguard``.
        sure: Whether an incident that somebody else made may change files.
        dry_run: Whether to show the change and write nothing.
    """
    place = folder if folder is not None else _newest()
    incident = incidents.read(place)
    chosen = _chosen(incident, place)
    if not sure and not dry_run:
        _must_be_ours(incident, place)
    path = _file_of(chosen["diff"], incident, place)
    before = path.read_bytes()
    _must_be_the_same(before, chosen, path, place)
    after = patched(before, chosen["diff"], str(path))
    if not dry_run:
        write_atomically(path, after)
    _print(incident, chosen, path, written=not dry_run)


def patched(content: bytes, diff: str, name: str) -> bytes:
    """Returns what a unified diff makes of a file.

    Args:
        content: The file.
        diff: The diff.
        name: The file's name, for the error.

    Raises:
        UsageError: The file does not hold the lines that the diff is about.
    """
    encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
    lines = content.decode(encoding.replace("-sig", "")).split("\n")
    out: list[str] = []
    done = 0
    for hunk in _hunks(diff):
        begin = hunk.begin - 1
        found = lines[begin : begin + len(hunk.old)]
        if begin < done or found != hunk.old:
            raise UsageError(
                f"{name} does not hold the lines that the change is about (line {hunk.begin}).",
                where=_COMMAND,
                do="The file was edited since, or the change is made already: look at it, and run "
                "the command again for a new incident.",
            )
        out += lines[done:begin] + hunk.new
        done = begin + len(hunk.old)
    return "\n".join(out + lines[done:]).encode(encoding.replace("-sig", ""))


@dataclass(slots=True)
class _Hunk:
    """A part of a diff: the lines that are there, from which one on, and those instead."""

    begin: int
    old: list[str]
    new: list[str]


def _hunks(diff: str) -> list[_Hunk]:
    hunks: list[_Hunk] = []
    for line in diff.split("\n"):
        head = _HUNK.match(line)
        if head is not None:
            hunks.append(_Hunk(int(head[1]), [], []))
        elif hunks and line.startswith("\\"):
            # The line before has no line break: it is the last of its file.
            continue
        elif hunks and line:
            if line[0] in " -":
                hunks[-1].old.append(line[1:])
            if line[0] in " +":
                hunks[-1].new.append(line[1:])
    return hunks


def _newest() -> Path:
    """Returns the newest incident that has a change to make, or else the newest."""
    found = newest_incidents(_COMMAND)
    for place in found:
        with contextlib.suppress(IncidentError):
            if words.is_fixable(incidents.read(place)):
                return place
    return found[0]


def _chosen(incident: Incident, place: Path) -> dict[str, Any]:
    """Returns the first change that a replay has shown to help."""
    fixes = entries(incident, "fixes")
    for fix in fixes:
        diff = fix.get("diff")
        if fix.get("verified") is True and isinstance(diff, str) and _HUNK.search(diff):
            return fix
    advice = next((text(fix, "summary") for fix in fixes if text(fix, "summary")), "")
    raise UsageError(
        "no change to a file was verified for this incident.",
        where=str(place),
        do=f"What can be done: {advice}." if advice else f"Look at it: nanguard explain {place}",
    )


def _must_be_ours(incident: Incident, place: Path) -> None:
    run = branch(incident, "run")
    command, folder = run.get("command"), run.get("folder")
    words_of = [str(word) for word in command] if isinstance(command, list) else []
    if not is_ours(words_of, str(folder), run.get("signature")):
        raise UsageError(
            "this incident was not made by you, and its change would be written to a file.",
            where=str(place),
            do="Read the change with --dry-run. If you trust it, add --yes.",
        )


def _file_of(diff: str, incident: Incident, place: Path) -> Path:
    """Returns the file that a diff names; it lies below the folder that the command ran in."""
    named = next((line[6:] for line in diff.split("\n") if line.startswith("+++ b/")), "")
    folder = Path(text(branch(incident, "run"), "folder", 4000) or Path.cwd()).resolve()
    if not folder.is_dir():
        folder = Path.cwd().resolve()  # the project was moved
    path = (folder / named).resolve()
    if not named or not path.is_relative_to(folder) or path.suffix != ".py":
        raise UsageError(
            f"the change is about {literal(named)!r}, which is not a Python file below {folder}.",
            where=str(place),
            do="Make the change by hand, if you trust it.",
        )
    if not path.is_file():
        raise UsageError(
            f"{path} is not there any more.",
            where=str(place),
            do="Start the command again where its files are, for a new incident.",
        )
    return path


def _must_be_the_same(content: bytes, fix: dict[str, Any], path: Path, place: Path) -> None:
    known = fix.get("sha256")
    if isinstance(known, str) and hashlib.sha256(content).hexdigest() != known:
        if _is_applied(content, fix):
            raise UsageError(
                f"the change is in {path} already.",
                where=str(place),
                do="Nothing was written. Start the run again.",
            )
        raise UsageError(
            f"{path} has changed since the change was tried.",
            where=str(place),
            do="Nothing was written. Make the change by hand (nanguard explain shows it), or run "
            "the command again for a new incident.",
        )


def _is_applied(content: bytes, fix: dict[str, Any]) -> bool:
    """Returns whether a text holds the lines that a change adds, and none that it removes."""
    lines = [line.rstrip() for line in content.decode("utf-8", "replace").splitlines()]
    diff = str(fix["diff"]).splitlines()
    added = [line[1:].rstrip() for line in diff if line[:1] == "+" and line[:3] != "+++"]
    removed = [line[1:].rstrip() for line in diff if line[:1] == "-" and line[:3] != "---"]
    return bool(added) and set(added) <= set(lines) and not set(removed) & set(lines)


def _has_guard(command: list[str], folder: Path) -> bool:
    """Returns whether the script of a command brings a guard of its own along."""
    for word in command:
        path = folder / word
        with contextlib.suppress(OSError, ValueError):
            if path.suffix == ".py" and path.is_file():
                with path.open("rb") as file:
                    return b"import nanguard" in (start := file.read(_SCRIPT)) or (
                        b"from nanguard" in start
                    )
    return False


def _print(incident: Incident, fix: dict[str, Any], path: Path, *, written: bool) -> None:
    console = Console(soft_wrap=True)
    said = words.sentence(incident)
    if said:
        console.print(Text(said))
    done = "Changed" if written else "Would change"
    console.print(Text(f"{done} {literal(str(path), 4000)}: {text(fix, 'summary')}"))
    for line in str(fix["diff"]).rstrip("\n").split("\n"):
        console.print(Text(f"  {source(line)}", style=words.diff_style(line)))
    console.print(Text(words.fix(fix)[0]))
    command = [shlex.quote(word) for word in texts(branch(incident, "run"), "command")]
    if not command:
        return
    folder = Path(text(branch(incident, "run"), "folder", 4000) or ".")
    there = "" if folder.resolve() == Path.cwd().resolve() else f"cd {shlex.quote(str(folder))} && "
    guard = "" if _has_guard(command, folder) else "nanguard run -- "
    console.print(Text(f"To go on: {there}{guard}{' '.join(command)}"))
