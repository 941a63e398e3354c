"""``nanguard fix``: makes the change that a replay has verified, in the file it was verified for.

The diff comes out of an incident, which a stranger may have written. It is applied only to a Python
file below the folder that the command ran in, only if that file is what it was when the change was
tried, and an incident that this user did not make needs consent.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
import shlex
import tokenize
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from nanguard import incident as incidents
from nanguard.cli.incident_names import incident_named, newest_incidents
from nanguard.errors import IncidentError, UsageError
from nanguard.run.trust import is_ours
from nanguard.source.text import write_atomically
from nanguard.view.report import words
from nanguard.view.report.fields import branch, entries, literal, source, text, texts

if TYPE_CHECKING:
    from nanguard.cli.commands.after import FixOptions
    from nanguard.incident import Incident

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,\d+)? @@")
_COMMAND = "nanguard fix"


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
            f"the change is about {literal(named)!r}, which is no Python file below {folder}.",
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
        raise UsageError(
            f"{path} has changed since the change was tried.",
            where=str(place),
            do="Nothing was written. Make the change by hand (nanguard explain shows it), or run "
            "the command again for a new incident.",
        )


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
    console.print(Text(f"To go on: {there}nanguard run -- {' '.join(command)}"))
