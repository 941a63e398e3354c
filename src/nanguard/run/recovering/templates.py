"""Arguments as the user describes them, such as ``--lr {lr}``, put into a command."""

from __future__ import annotations

import re
import shlex
import string
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanguard.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

PLACEHOLDERS = ("checkpoint", "step", "lr", "skip", "seed", "attempt")
_NUMBER = re.compile(r"-\.?\d")


@dataclass(frozen=True, slots=True)
class Group:
    """Words that stand or fall together: an option with its values, or one ``key=value``.

    Attributes:
        words: The words, placeholders included.
    """

    words: tuple[str, ...]

    @property
    def option(self) -> str | None:
        """The option they begin with, if it stands alone; None otherwise."""
        first = self.words[0]
        return first if is_option(first) and "=" not in first else None

    @property
    def key(self) -> str | None:
        """What stands before the equals sign of the last word; None if there is none."""
        before, equals, _ = self.words[-1].partition("=")
        return before if equals and "{" not in before else None


@dataclass(frozen=True, slots=True)
class TemplatePlace:
    """Where a group stands in a command.

    Attributes:
        begin: The first word.
        end: The word behind the last one.
        value: The value that stands there; empty if there is none.
        whole: Whether the option belongs to it; otherwise only ``key=value`` is replaced.
    """

    begin: int
    end: int
    value: str
    whole: bool = True


@dataclass(frozen=True, slots=True)
class Template:
    """Arguments with placeholders.

    Attributes:
        groups: Its words, by option.
    """

    groups: tuple[Group, ...]

    @classmethod
    def of(cls, text: str, option: str, needs: Sequence[str]) -> Template:
        """Reads a template.

        Args:
            text: What the user wrote.
            option: The option it was given with.
            needs: Placeholders of which one must occur.

        Raises:
            UsageError: It cannot be filled, or would say nothing.
        """
        where = f"nanguard run {option} {shlex.quote(text)}"
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise UsageError(
                f"the template cannot be split into words: {error}.",
                where=where,
                do="Close every quotation mark.",
            ) from error
        found = {name for word in words for name in placeholders(word, where)}
        if not found & set(needs):
            wanted = " or ".join(f"{{{name}}}" for name in needs)
            raise UsageError(
                f"the template has no {wanted}, so that it would say the same every time.",
                where=where,
                do=f'Write where it goes, for example: {option} "{_EXAMPLES[needs[0]]}"',
            )
        return cls(tuple(_groups(words)))

    def into(self, command: Sequence[str], values: Mapping[str, str]) -> list[str]:
        """Returns a command with these arguments in it; what it said before is replaced."""
        words = list(command)
        for group in self.groups:
            filled = [filled_in(word, values) for word in group.words]
            place = _find(group, words)
            if place is None:
                words += filled
            else:
                words[place.begin : place.end] = filled if place.whole else filled[-1:]
        return words

    def value_in(self, command: Sequence[str], name: str) -> str | None:
        """Returns what a command gives for a placeholder by itself; None if it does not."""
        for group in self.groups:
            last = group.words[-1]
            if last != f"{{{name}}}" and not last.endswith(f"={{{name}}}"):
                continue
            place = _find(group, command)
            if place is not None and place.value:
                return place.value
        return None

    def key_of(self, name: str) -> str | None:
        """Returns the key or option whose value a placeholder is."""
        for group in self.groups:
            if group.words[-1].endswith(f"{{{name}}}"):
                return group.key or group.option
        return None


_EXAMPLES = {
    "checkpoint": "--resume {checkpoint}",
    "lr": "--lr {lr}",
    "skip": "--skip-steps {skip}",
    "seed": "--seed {seed}",
}


def placeholders(text: str, where: str) -> set[str]:
    """Returns the placeholders of a text.

    Raises:
        UsageError: One is not known, or the braces do not match.
    """
    try:
        parsed = list(string.Formatter().parse(text))
    except ValueError as error:
        raise UsageError(
            f"the template {text!r} cannot be read: {error}.",
            where=where,
            do="Write {{ and }} for braces that are none of ours.",
        ) from error
    for _, name, form, conversion in parsed:
        if name is not None and (name not in PLACEHOLDERS or form or conversion):
            known = ", ".join(f"{{{known}}}" for known in PLACEHOLDERS)
            raise UsageError(
                f"there is no placeholder {{{name}}}.",
                where=where,
                do=f"Use one of {known}; write {{{{ and }}}} for other braces.",
            )
    return {name for _, name, _, _ in parsed if name is not None}


def filled_in(text: str, values: Mapping[str, str]) -> str:
    """Returns a text with its placeholders replaced."""
    return text.format_map(values)


def is_option(word: str) -> bool:
    """Returns whether a word is an option, and not a negative number."""
    return word.startswith("-") and len(word) > 1 and _NUMBER.match(word) is None


def _groups(words: Sequence[str]) -> Iterator[Group]:
    held: list[str] = []
    for word in words:
        complete = len(held) != 1 or not is_option(held[0]) or "=" in held[0]
        if held and (is_option(word) or (complete and "=" in word)):
            yield Group(tuple(held))
            held = []
        held.append(word)
    if held:
        yield Group(tuple(held))


def _find(group: Group, command: Sequence[str]) -> TemplatePlace | None:
    """Returns where a command says what a group says; the last place counts, as it does there."""
    for at in range(len(command) - 1, -1, -1):
        place = _place(group, command, at)
        if place is not None:
            return place
    return None


def _place(group: Group, command: Sequence[str], at: int) -> TemplatePlace | None:
    option, key, word = group.option, group.key, command[at]
    if option is None:
        return None if key is None else _pair(key, command, at)
    if key is not None:  # --set training.lr={lr}
        if word.startswith(f"{key}=") and option in command[:at]:
            return TemplatePlace(at, at + 1, word.partition("=")[2], whole=False)
        return None
    if word.startswith(f"{option}="):
        return TemplatePlace(at, at + 1, word.partition("=")[2])
    if word != option:
        return None
    end = at + 1
    while end < len(command) and end - at < len(group.words) and not is_option(command[end]):
        end += 1
    return TemplatePlace(at, end, command[end - 1] if end > at + 1 else "")


def _pair(key: str, command: Sequence[str], at: int) -> TemplatePlace | None:
    """Returns the place of ``key=value``, which may be written as ``--key value``, too."""
    word = command[at]
    # Hydra writes a plus before what is new.
    if word.lstrip("+").startswith(f"{key.lstrip('+')}="):
        return TemplatePlace(at, at + 1, word.partition("=")[2])
    has_value = at + 1 < len(command) and not is_option(command[at + 1])
    if is_option(key) and word == key and has_value:
        return TemplatePlace(at, at + 2, command[at + 1])
    return None
