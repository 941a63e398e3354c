"""The words of a command line: what a command takes, and reading it.

A command is a dataclass, and each of its fields an option (``option``, ``flag``) or its arguments
(``argument``). The same declaration is parsed, shown by ``--help``, completed by a shell and
listed in the documentation. Nothing here imports more than the standard library: a small file is
checked in the time that a library for command lines takes to load.
"""

from __future__ import annotations

import os
from dataclasses import MISSING, dataclass, field, fields
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from nanguard.errors import NanguardError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

OPTIONS = "Options"
HELP = ("-h", "--help")
_WORDS = "words"
_KINDS = {int: "a whole number", float: "a number"}


class CommandLineError(UsageError):
    """A command line that cannot be read; it is shown with the way to the help."""


@dataclass(frozen=True, slots=True)
class Words:
    """How a field of a command is given on the command line.

    Attributes:
        names: The names of an option, such as ``--output`` and ``-o``; none for arguments.
        help: What it is, in a sentence.
        metavar: What stands for its value in the help; empty for a flag.
        kind: What makes the value of a word.
        choices: The words it can be; a function where listing them takes time.
        least: The smallest number it can be.
        most: The largest.
        many: Whether it can be given several times.
        commas: Whether each of them can be several words with commas.
        rest: Whether the arguments are another command, with options of its own.
        panel: The heading in the help under which it stands.
        env: The environment variable that stands for it.
        completes: What a shell completes: ``files``, ``folders``, ``rules``, ``incidents``.
    """

    names: tuple[str, ...]
    help: str
    metavar: str = ""
    kind: Callable[[str], Any] = str
    choices: Sequence[str] | Callable[[], Sequence[str]] = ()
    least: float | None = None
    most: float | None = None
    many: bool = False
    commas: bool = False
    rest: bool = False
    panel: str = OPTIONS
    env: str = ""
    completes: str = ""

    @property
    def is_flag(self) -> bool:
        """Whether it takes no value."""
        return not self.metavar

    def all_choices(self) -> tuple[str, ...]:
        """Returns the words it can be; none if it can be anything."""
        return tuple(self.choices() if callable(self.choices) else self.choices)


def option(*names: str, default: Any = None, **words: Any) -> Any:
    """Declares an option with a value; see ``Words``."""
    made = Words(names, **words)
    given = () if made.many and default is None else default
    return field(default=given, metadata={_WORDS: made}, kw_only=True)


def flag(*names: str, help: str, panel: str = OPTIONS) -> Any:  # noqa: A002 - as in the help
    """Declares an option without a value."""
    made = Words(names, help, panel=panel)
    return field(default=False, metadata={_WORDS: made}, kw_only=True)


def argument(metavar: str, help: str, **words: Any) -> Any:  # noqa: A002 - as in the help
    """Declares what stands on the command line without a name; see ``Words``."""
    default = words.pop("default", MISSING)
    made = Words((), help, metavar, **words)
    return field(default=default, metadata={_WORDS: made})


class Declared(NamedTuple):
    """A field of a command, with how it is given."""

    name: str
    words: Words
    default: Any

    @property
    def is_required(self) -> bool:
        """Whether it must be given."""
        return self.default is MISSING


@dataclass(frozen=True, slots=True)
class Command:
    """A command of the program.

    Attributes:
        name: What it is called by.
        options: The dataclass of its options; its docstring is the help.
        runs: The function that runs it, as ``module:function``; it gets the options, and returns
            the exit code, or nothing for 0.
        group: The heading under which it is listed.
        examples: Command lines worth showing.
    """

    name: str
    options: type[Any]
    runs: str
    group: str
    examples: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """The first sentence of its help."""
        return self.paragraphs()[0]

    def paragraphs(self) -> list[str]:
        """Returns its help, paragraph by paragraph."""
        from inspect import cleandoc

        text = cleandoc(self.options.__doc__ or "")
        return [" ".join(part.split()) for part in text.split("\n\n")]

    def declared(self) -> list[Declared]:
        """Returns its options and arguments, in the order in which they are declared."""
        return [
            Declared(one.name, one.metadata[_WORDS], one.default)
            for one in fields(self.options)
            if _WORDS in one.metadata
        ]

    def arguments(self) -> Declared | None:
        """Returns what stands on its line without a name; None if nothing does."""
        return next((one for one in self.declared() if not one.words.names), None)

    def named(self) -> list[Declared]:
        """Returns its options."""
        return [one for one in self.declared() if one.words.names]

    def run(self, options: Any) -> int:
        """Runs it; returns the exit code."""
        module, _, function = self.runs.partition(":")
        code = getattr(import_module(module), function)(options)
        return 0 if code is None else int(code)


def read(command: Command, words: Sequence[str]) -> Any:
    """Returns the options of a command as a command line gives them; None if it asks for help.

    Args:
        command: The command.
        words: What stands behind its name.

    Raises:
        CommandLineError: A word is not understood.
    """
    reading = _Reading(command)
    return None if reading.take(list(words)) else command.options(**reading.values())


def suggestion(word: str, known: Iterable[str]) -> str:
    """Returns a question about what a word was meant to be; empty if nothing is near."""
    from difflib import get_close_matches

    near = get_close_matches(word, list(known), n=3, cutoff=0.6)
    return f"Did you mean {' or '.join(near)}?" if near else ""


def did_you_mean(word: str, known: Iterable[str], otherwise: str) -> str:
    """Returns a question about what a word was meant to be, or else something to do."""
    return suggestion(word, known) or otherwise


def mistake(command: str, what: str, do: str) -> CommandLineError:
    """Returns the error for a word that is not understood."""
    return CommandLineError(what, where=f"nanguard {command}".strip(), do=do)


class _Reading:
    """Reads the words of one command line."""

    def __init__(self, command: Command) -> None:
        self._command = command
        self._options = {name: one for one in command.named() for name in one.words.names}
        self._arguments = command.arguments()
        self._loose: list[str] = []
        self._given: dict[str, Any] = {}

    def take(self, words: list[str]) -> bool:
        """Reads all words, from the first to the last; returns whether one asks for help."""
        while words:
            word = words.pop(0)
            if word in HELP:
                return True
            if word == "--":
                self._loose += words
                return False
            if word == "-" or not word.startswith("-"):
                self._loose.append(word)
                if self._arguments is not None and self._arguments.words.rest:
                    # What follows belongs to the command that is run.
                    self._loose += words
                    return False
            elif word.startswith("--") or word in self._options:
                name, equals, value = word.partition("=")
                self._take_option(name, value if equals else None, words)
            else:
                self._take_short(word, words)
        return False

    def values(self) -> dict[str, Any]:
        """Returns the values of all fields that were given."""
        given = {**self._from_environment(), **self._given}
        declared = self._arguments
        if declared is None:
            if self._loose:
                raise mistake(
                    self._command.name,
                    f"{self._loose[0]!r} means nothing here.",
                    f"Leave it out; nanguard {self._command.name} takes options only.",
                )
            return given
        return {**given, **self._positional(declared)}

    def _positional(self, declared: Declared) -> dict[str, Any]:
        words = declared.words
        if not self._loose:
            if declared.is_required:
                raise mistake(
                    self._command.name,
                    f"{words.metavar} is missing.",
                    f"For example: {self._command.examples[0]}",
                )
            return {}
        if not words.many and len(self._loose) > 1:
            raise mistake(
                self._command.name,
                f"{self._loose[1]!r} is one word too many.",
                f"Give one {words.metavar}; put a name with spaces in quotes.",
            )
        made = [self._made(declared, words.metavar, word) for word in self._loose]
        return {declared.name: tuple(made) if words.many else made[0]}

    def _take_option(self, name: str, value: str | None, rest: list[str]) -> None:
        declared = self._options.get(name)
        if declared is None:
            raise mistake(
                self._command.name,
                f"there is no option {name}.",
                did_you_mean(
                    name,
                    [*self._options, "--help"],
                    f"nanguard {self._command.name} -h lists the options.",
                ),
            )
        words = declared.words
        if words.is_flag:
            if value is not None:
                raise mistake(self._command.name, f"{name} takes no value.", f"Write {name} alone.")
            self._given[declared.name] = True
            return
        if value is None:
            if not rest or rest[0] in self._options:
                raise mistake(
                    self._command.name,
                    f"{name} needs a value.",
                    f"Write {name} {words.metavar}. {words.help}",
                )
            value = rest.pop(0)
        self._keep(declared, name, value)

    def _take_short(self, word: str, rest: list[str]) -> None:
        """Reads ``-qv`` as ``-q -v``, and ``-oFILE`` as ``-o FILE``."""
        first = self._options.get(word[:2])
        if first is not None and not first.words.is_flag:
            self._keep(first, word[:2], word[2:].removeprefix("="))
            return
        letters = [f"-{letter}" for letter in word[1:]]
        unknown = [letter for letter in letters if letter not in self._options]
        flags = all(self._options[letter].words.is_flag for letter in letters if not unknown)
        if unknown or not flags:
            self._take_option(unknown[0] if len(letters) == 1 else word, None, rest)
        for letter in letters:
            self._take_option(letter, None, rest)

    def _keep(self, declared: Declared, name: str, value: str) -> None:
        words = declared.words
        parts = [part.strip() for part in value.split(",")] if words.commas else [value]
        made = [self._made(declared, name, part) for part in parts if part or not words.commas]
        if not words.many:
            self._given[declared.name] = made[0]
            return
        self._given[declared.name] = (*self._given.get(declared.name, ()), *made)

    def _made(self, declared: Declared, name: str, value: str) -> Any:
        words = declared.words
        choices = words.all_choices()
        if choices and value not in choices:
            listed = f"Give one of: {', '.join(choices)}."
            raise mistake(
                self._command.name,
                f"{name} cannot be {value!r}.",
                " ".join(part for part in (suggestion(value, choices), listed) if part),
            )
        if not value:
            raise mistake(self._command.name, f"{name} is empty.", f"Give {words.metavar}.")
        try:
            made = words.kind(value)
        except ValueError as error:
            if isinstance(error, NanguardError):
                raise
            kind = _KINDS.get(words.kind, "a value")  # type: ignore[call-overload]
            do = f"Give {kind}{_bounds(words)}."
            raise mistake(self._command.name, f"{name} cannot be {value!r}.", do) from error
        low = words.least is None or made >= words.least
        high = words.most is None or made <= words.most
        if not (low and high):
            do = f"Give {_KINDS.get(words.kind, 'a value')}{_bounds(words)}."  # type: ignore[call-overload]
            raise mistake(self._command.name, f"{name} cannot be {value}.", do)
        return made

    def _from_environment(self) -> dict[str, Any]:
        found = {}
        for declared in self._command.named():
            value = os.environ.get(declared.words.env) if declared.words.env else None
            if value and declared.name not in self._given:
                parts = value.splitlines() if declared.words.many else [value]
                made = [self._made(declared, declared.words.env, part) for part in parts]
                found[declared.name] = tuple(made) if declared.words.many else made[0]
        return found


def _bounds(words: Words) -> str:
    if words.least is not None and words.most is not None:
        return f" from {words.least:g} to {words.most:g}"
    return "" if words.least is None else f" of at least {words.least:g}"
