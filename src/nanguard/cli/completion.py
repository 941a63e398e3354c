"""``nanguard completion``: scripts that complete the command line in a shell.

The scripts are made from the declarations of the commands and hold all words themselves, so that
no process is started when the tab key is pressed. Only incidents are looked up, by the shell.
"""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

from nanguard.cli.commands import COMMANDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.cli.command_line import Command, Words
    from nanguard.cli.commands.showing import CompletionOptions

_GENERAL = ("--help", "--version")
# Lists the steps of the incidents below this folder.
_STEPS = (
    "ls -d .nanguard/*/*/step-* 2>/dev/null | sed -n 's/.*step-0*\\([0-9][0-9]*\\)-rank.*/\\1/p'"
)


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
        yield f'    -*) COMPREPLY=($(compgen -W "{_names(command)}" -- "$word")); return;;'
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


def _names(command: Command) -> str:
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
