"""The help of a command: on a terminal, and as a page of the documentation."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING

from nanguard.cli.command_line import OPTIONS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from nanguard.cli.command_line import Command, Declared

# Columns: prose that is wider is hard to read, and names that are longer get a line of their own.
_WIDEST = 100
_LONGEST_NAME = 26
_HELP = ("-h, --help", "Show this help.")
ABOUT = "Keeps a PyTorch run alive when its numbers go bad, and says why they did."
GENERAL = (
    ("-h, --help", "Show this help; also after a command."),
    ("-V, --version", "Show the version."),
)


def program_help(commands: Sequence[Command]) -> str:
    """Returns the help of the program: its commands by their groups."""
    lines = [f"{_bold('Usage:')} nanguard COMMAND [options]", "", ABOUT]
    for group in dict.fromkeys(command.group for command in commands):
        rows = [(one.name, _plain(one.summary)) for one in commands if one.group == group]
        lines += ["", _bold(f"{group}:"), *_rows(rows, 10)]
    lines += ["", _bold(f"{OPTIONS}:"), *_rows(GENERAL, 15)]
    lines += ["", "nanguard COMMAND -h shows the options of a command, with examples."]
    return "\n".join(lines) + "\n"


def command_help(command: Command) -> str:
    """Returns the help of a command."""
    lines = [f"{_bold('Usage:')} {usage(command)}"]
    for paragraph in command.paragraphs():
        lines += ["", *textwrap.wrap(_plain(paragraph), _width())]
    arguments = command.arguments()
    if arguments is not None:
        rows = [(arguments.words.metavar, _about(arguments))]
        lines += ["", _bold("Arguments:"), *_rows(rows)]
    for panel, declared in _panels(command):
        rows = [(_names(one), _about(one)) for one in declared]
        lines += ["", _bold(f"{panel}:"), *_rows([*rows, *([_HELP] if panel == OPTIONS else [])])]
    if command.examples:
        lines += ["", _bold("Examples:"), *(f"  {one}" for one in command.examples)]
    return "\n".join(lines) + "\n"


def usage(command: Command) -> str:
    """Returns a command line in general."""
    words = [f"nanguard {command.name}", "[options]"]
    arguments = command.arguments()
    if arguments is not None:
        one = arguments.words.metavar + (" ..." if arguments.words.many else "")
        one = f"-- {one}" if arguments.words.rest else one
        words.append(one if arguments.is_required else f"[{one}]")
    return " ".join(words)


def reference(commands: Sequence[Command]) -> str:
    """Returns the page of the documentation about all commands, in Markdown."""
    lines = [
        "# Command line",
        "",
        "Every command and every option; `nanguard COMMAND -h` shows the same in the terminal. "
        "Written from the program itself with `make docs-cli`.",
        "",
        "| exit code | meaning |",
        "| --- | --- |",
        "| 0 | a clean end |",
        "| 1 | findings (`check`), a bad step (`replay`), an alarm (`watch --until-alarm`) |",
        "| 2 | nanguard could not do its work, or the command line is wrong |",
        "| 3 | `run`: the guard stopped the command; otherwise its own exit code |",
        "| 130 | interrupted with Ctrl-C |",
    ]
    for group in dict.fromkeys(command.group for command in commands):
        lines += ["", f"## {group}"]
        for command in commands:
            if command.group == group:
                lines += ["", *_section(command)]
    return "\n".join(lines) + "\n"


def _section(command: Command) -> Iterator[str]:
    yield from (f"### nanguard {command.name}", "", f"```text\n{usage(command)}\n```")
    for paragraph in command.paragraphs():
        yield from ("", paragraph)
    arguments = command.arguments()
    rows = [] if arguments is None else [(arguments.words.metavar, _about(arguments))]
    if rows:
        yield from ("", "| argument | |", "| --- | --- |")
        yield from (f"| `{_cell(name)}` | {_cell(about)} |" for name, about in rows)
    for panel, declared in _panels(command):
        yield from ("", f"| {panel.lower()} | |", "| --- | --- |")
        yield from (f"| `{_cell(_names(one))}` | {_cell(_about(one))} |" for one in declared)
    if command.examples:
        yield from ("", "```bash", *command.examples, "```")


def _panels(command: Command) -> Iterator[tuple[str, list[Declared]]]:
    named = command.named()
    for panel in dict.fromkeys([OPTIONS, *(one.words.panel for one in named)]):
        declared = [one for one in named if one.words.panel == panel]
        if declared or panel == OPTIONS:
            yield panel, declared


def _names(declared: Declared) -> str:
    words = declared.words
    short = [name for name in words.names if not name.startswith("--")]
    long = [name for name in words.names if name.startswith("--")]
    return f"{', '.join([*short, *long])} {words.metavar}".rstrip()


def _about(declared: Declared) -> str:
    """Returns what the help says about an option: what it is, what it can be, its default."""
    words = declared.words
    parts = [words.help]
    choices = words.all_choices()
    if choices:
        named = [f"{one} (default)" if one == declared.default else one for one in choices]
        parts.append(f"One of {', '.join(named)}.")
    elif words.names and declared.default and isinstance(declared.default, (str, int, float)):
        parts.append(f"Default: {declared.default}.")
    if words.many and words.names:
        parts.append("May be repeated.")
    if words.env:
        parts.append(f"Also read from ${words.env}.")
    return " ".join(part for part in parts if part)


def _rows(rows: Iterable[tuple[str, str]], wide: int = 0) -> Iterator[str]:
    listed = list(rows)
    column = min(max([wide, *(len(name) for name, _ in listed)]), _LONGEST_NAME)
    for name, about in listed:
        room = max(_width() - column - 4, 20)
        lines = textwrap.wrap(about, room) or [""]
        if len(name) > column:
            yield f"  {name}"
            yield f"  {'':{column}}  {lines[0]}"
        else:
            yield f"  {name:{column}}  {lines[0]}".rstrip()
        yield from (f"  {'':{column}}  {line}" for line in lines[1:])


def _width() -> int:
    return min(shutil.get_terminal_size((_WIDEST, 25)).columns, _WIDEST)


def _bold(text: str) -> str:
    plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    return text if plain or not sys.stdout.isatty() else f"\x1b[1m{text}\x1b[0m"


def _plain(text: str) -> str:
    """Returns prose without the marks of Markdown."""
    return re.sub(r"`([^`]+)`", r"\1", text)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    from nanguard.cli.commands import COMMANDS

    sys.stdout.write(reference(COMMANDS))
