"""The program ``nanguard``, to which each file beside this one adds its commands.

A command is declared when its file is imported, and built when it is called: reading the
annotations of all commands takes longer than most of them take to answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from nanguard import __version__

# Types of click; newer versions of typer carry a click of their own, and the two share no name.
Context = Any
HelpFormatter = Any

Function = TypeVar("Function", bound=Callable[..., Any])


class Documented(TyperCommand):
    """A command whose help is a page of ours."""

    def format_help(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Writes the help of this command."""
        from nanguard.cli.help_page import command_page

        formatter.write(command_page(self, ctx))


@dataclass(frozen=True, slots=True)
class Declared(Mapping[str, Any]):
    """The commands by name, each built when it is looked up for the first time.

    Attributes:
        functions: What each command calls.
        options: How it was declared.
        built: Those that were looked up.
    """

    functions: dict[str, Callable[..., Any]] = field(default_factory=dict)
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    built: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        if name not in self.built:
            alone = typer.Typer(add_completion=False, rich_markup_mode=None)
            alone.command(name, cls=Documented, **self.options[name])(self.functions[name])
            self.built[name] = typer.main.get_command(alone)
        return self.built[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.functions)

    def __len__(self) -> int:
        return len(self.functions)

    def sentences(self) -> dict[str, str]:
        """Returns what each command does, in a sentence, without building any."""
        return {
            name: (function.__doc__ or "").strip().split("\n\n")[0]
            for name, function in self.functions.items()
        }


class Commands(TyperGroup):
    """All commands of the program."""

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**{**attrs, "commands": app.declared})

    def list_commands(self, ctx: Context) -> list[str]:
        """Returns the names of the commands, in their order."""
        return list(self.commands)

    def format_help(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Writes the help of the program."""
        from nanguard.cli.help_page import program_page

        formatter.write(program_page(self, ctx, app.declared.sentences()))


class Program(typer.Typer):
    """A program that builds only the command that is called."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.declared = Declared()

    def command(self, name: str | None = None, **options: Any) -> Callable[[Function], Function]:
        """Returns a decorator that makes a function a command."""

        def declare(function: Function) -> Function:
            called = name or function.__name__.replace("_", "-")
            self.declared.functions[called] = function
            self.declared.options[called] = options
            return function

        return declare


app = Program(
    name="nanguard",
    cls=Commands,
    help="Keeps a PyTorch run alive when its numbers go bad, and tells you why they did.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:  # noqa: FBT001 - typer's callback
    if wanted:
        typer.echo(f"nanguard {__version__}")
        raise typer.Exit


@app.callback()
def nanguard(
    version: Annotated[  # noqa: FBT002 - read by the callback
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Keeps a PyTorch run alive when its numbers go bad, and tells you why they did."""
