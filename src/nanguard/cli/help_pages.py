"""The help of a command, on a terminal and as a page, and scripts that complete it in a shell.

The scripts are made from the declarations of the commands and hold all words themselves, so that
no process is started when the tab key is pressed. Only incidents are looked up, by the shell.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING

from nanguard.cli.command_line import OPTIONS
from nanguard.cli.commands import COMMANDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from nanguard.cli.command_line import Command, Declared, Words
    from nanguard.cli.commands.before import CompletionOptions

# Columns: prose that is wider is hard to read, and names that are longer get a line of their own.
_WIDEST = 100
# Columns for names; a longer one has its text on the next line.
_LONGEST_NAME = 26
_HELP = ("-h, --help", "Show this help.")
ABOUT = "Keeps a PyTorch run alive when its numbers go bad, and says why they did."
GENERAL = (
    ("-h, --help", "Show this help; also after a command."),
    ("-V, --version", "Show the version."),
)
_GENERAL = ("--help", "--version")
# Lists the steps of the incidents below this folder.
_STEPS = (
    "ls -d .nanguard/*/*/step-* 2>/dev/null | sed -n 's/.*step-0*\\([0-9][0-9]*\\)-rank.*/\\1/p'"
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


def print_script(options: CompletionOptions) -> None:
    """Prints the script of a shell."""
    sys.stdout.write(script(options.shell))


def script(shell: str) -> str:
    """Returns the script of a shell.

    Args:
        shell: ``bash``, ``zsh`` or ``fish``.
    """
    if shell == "fish":
        return "\n".join(_fish()) + "\n"
    head = ["autoload -U +X bashcompinit && bashcompinit"] if shell == "zsh" else []
    return "\n".join([*head, *_bash()]) + "\n"


def _bash() -> Iterator[str]:
    yield "_nanguard() {"
    yield '  local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"'
    yield "  COMPREPLY=()"
    yield "  if [ $COMP_CWORD -eq 1 ]; then"
    names = " ".join([*(command.name for command in COMMANDS), *_GENERAL])
    yield f'    COMPREPLY=($(compgen -W "{names}" -- "$word")); return'
    yield "  fi"
    yield '  case "${COMP_WORDS[1]}" in'
    for command in COMMANDS:
        yield f"  {command.name})"
        yield '    case "$before" in'
        for one in command.named():
            if not one.words.is_flag:
                yield f"    {'|'.join(one.words.names)}) {_bash_values(one.words)}; return;;"
        yield "    esac"
        yield '    case "$word" in'
        yield f'    -*) COMPREPLY=($(compgen -W "{_options_of(command)}" -- "$word")); return;;'
        yield "    esac"
        arguments = command.arguments()
        if arguments is not None:
            yield f"    {_bash_values(arguments.words)};;"
        else:
            yield "    ;;"
    yield "  esac"
    yield "}"
    yield "complete -o filenames -o bashdefault -F _nanguard nanguard"


def _bash_values(words: Words) -> str:
    if words.rest:
        return 'COMPREPLY=($(compgen -c -f -- "$word"))'
    listed = _listed(words)
    if words.completes == "incidents":
        return (
            f'COMPREPLY=($(compgen -W "$({_STEPS}) {listed}" -- "$word") $(compgen -d -- "$word"))'
        )
    if listed:
        return f'COMPREPLY=($(compgen -W "{listed}" -- "$word"))'
    if words.completes:
        kind = "-d" if words.completes == "folders" else "-f"
        return f'COMPREPLY=($(compgen {kind} -- "$word"))'
    return ":"


def _fish() -> Iterator[str]:
    first = "__fish_use_subcommand"
    yield "complete -c nanguard -f"
    for command in COMMANDS:
        about = shlex.quote(command.summary.replace("`", ""))
        yield f"complete -c nanguard -n {first} -a {command.name} -d {about}"
        here = shlex.quote(f"__fish_seen_subcommand_from {command.name}")
        for one in command.named():
            yield f"complete -c nanguard -n {here} {_fish_option(one.words)}"
        arguments = command.arguments()
        if arguments is not None:
            yield f"complete -c nanguard -n {here} {_fish_values(arguments.words)}"


def _fish_option(words: Words) -> str:
    names = [
        f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in words.names
    ]
    values = "" if words.is_flag else f" -r {_fish_values(words)}"
    return f"{' '.join(names)}{values} -d {shlex.quote(words.help)}"


def _fish_values(words: Words) -> str:
    listed = _listed(words)
    if listed:
        return f"-a {shlex.quote(listed)}"
    return "-F" if words.completes or words.rest else "-f"


def _options_of(command: Command) -> str:
    names = [name for one in command.named() for name in one.words.names]
    return " ".join([*names, "--help"])


def _listed(words: Words) -> str:
    """Returns the words that can be completed; rules and causes by their names."""
    if words.completes in ("rules", "incidents"):
        from nanguard.cli.rulepages import pages
        from nanguard.diagnose.cause import all_causes

        causes = [cause.code for cause in all_causes()] if words.completes == "incidents" else []
        return " ".join([*sorted(pages()), *causes])
    return " ".join(words.all_choices())
