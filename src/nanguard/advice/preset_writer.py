"""The settings of a preset with their notes, and the text of the file they make."""

from __future__ import annotations

import json
import re
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Scalar = bool | int | float | str


@dataclass(frozen=True, slots=True)
class SettingLine:
    """A key with a value.

    Attributes:
        key: The key.
        value: The value.
        note: Why it is so, and when to change it.
    """

    key: str
    value: Scalar | tuple[Scalar, ...]
    note: str


@dataclass(frozen=True, slots=True)
class SettingGroup:
    """A key with further keys below it.

    Attributes:
        key: The key.
        members: What is below it.
        note: What the section is for.
        listed: Whether it is a list with this one member.
    """

    key: str
    members: tuple[SettingLine | SettingGroup, ...]
    note: str = ""
    listed: bool = False


@dataclass(frozen=True, slots=True)
class Config:
    """A whole configuration.

    Attributes:
        header: What it is, paragraph by paragraph.
        members: What stands at its root.
    """

    header: tuple[str, ...]
    members: tuple[SettingLine | SettingGroup, ...]

    def notes(self) -> Iterator[tuple[str, str]]:
        """Yields every dotted key there is something to say about, and what."""
        yield from _notes(self.members, "")


def _notes(
    members: tuple[SettingLine | SettingGroup, ...], before: str
) -> Iterator[tuple[str, str]]:
    for member in members:
        dotted = f"{before}{member.key}"
        if member.note:
            yield dotted, member.note
        if isinstance(member, SettingGroup):
            yield from _notes(member.members, f"{dotted}.")


_LINE_LENGTH = 92
_PLAIN = re.compile(r"[A-Za-z_][\w./-]*")
# Words that YAML 1.1 takes for yes, no or nothing.
_NOT_TEXT = frozenset(("yes", "no", "on", "off", "true", "false", "null", "none", "y", "n"))
_Members = tuple[SettingLine | SettingGroup, ...]


def written(config: Config, language: str) -> str:
    """Returns a configuration in one of the languages."""
    return _WRITERS[language](config)


def notes_of(config: Config) -> str:
    """Returns what is said about a configuration that has no room for comments."""
    header = (line.removeprefix("#").removeprefix(" ") for line in heading(config.header))
    paragraphs = ["\n".join(header)]
    for key, note in config.notes():
        told = textwrap.fill(note, _LINE_LENGTH, initial_indent="    ", subsequent_indent="    ")
        paragraphs.append(f"{key}\n{told}")
    return "\n\n".join(paragraphs) + "\n"


def number(value: float) -> str:
    """Returns a number so that every reader takes it for one, YAML 1.1 included."""
    if value != 0 and abs(value) < 1e-3:
        digits, _, power = f"{value:e}".partition("e")
        return f"{float(digits)}e{int(power)}"
    return repr(value)


def comment(text: str, indent: str = "") -> Iterator[str]:
    """Yields a paragraph as lines of comment; a command, which is indented, stays one line."""
    if text.startswith("    "):
        yield f"{indent}# {text}"
        return
    hanging = " " * (5 if text.startswith("  ") else 0)
    for line in textwrap.wrap(text, _LINE_LENGTH - len(indent), subsequent_indent=hanging):
        yield f"{indent}# {line}"


def heading(lines: tuple[str, ...]) -> Iterator[str]:
    """Yields what stands above a file as lines of comment."""
    for line in lines:
        yield from comment(line) if line else ("#",)


def _yaml(config: Config) -> str:
    return "\n".join([*heading(config.header), "", *_yaml_members(config.members, "")]) + "\n"


def _yaml_members(members: _Members, indent: str) -> Iterator[str]:
    for member in members:
        yield from comment(member.note, indent)
        if isinstance(member, SettingLine):
            yield f"{indent}{member.key}: {_value(member.value, _yaml_text)}"
            continue
        yield f"{indent}{member.key}:"
        inner = _yaml_members(member.members, indent + ("    " if member.listed else "  "))
        yield from _as_item(inner, indent) if member.listed else inner


def _as_item(lines: Iterator[str], indent: str) -> Iterator[str]:
    """Yields the lines of a mapping as the one item of a list."""
    marked = False
    for line in lines:
        if marked or line.lstrip().startswith("#"):
            yield line
        else:
            marked = True
            yield f"{indent}  - {line.lstrip()}"


def _toml(config: Config) -> str:
    lines = [*heading(config.header), "", *_toml_table(config.members, "")]
    return "\n".join(lines) + "\n"


def _toml_table(members: _Members, name: str) -> Iterator[str]:
    for member in members:
        if isinstance(member, SettingLine):
            yield from comment(member.note)
            yield f"{member.key} = {_value(member.value, json.dumps)}"
    for member in members:
        if isinstance(member, SettingGroup):
            dotted = f"{name}.{member.key}" if name else member.key
            yield ""
            yield from comment(member.note)
            yield f"[[{dotted}]]" if member.listed else f"[{dotted}]"
            yield from _toml_table(member.members, dotted)


def _json(config: Config) -> str:
    return "\n".join(_json_object(config.members, "")) + "\n"


def _json_object(members: _Members, indent: str) -> Iterator[str]:
    inner = indent + "  "
    yield "{"
    for at, member in enumerate(members):
        comma = "," if at + 1 < len(members) else ""
        if isinstance(member, SettingLine):
            yield f"{inner}{json.dumps(member.key)}: {_value(member.value, json.dumps)}{comma}"
            continue
        first, *rest = _json_object(member.members, inner)
        opened, closed = ("[", "]") if member.listed else ("", "")
        yield f"{inner}{json.dumps(member.key)}: {opened}{first}"
        yield from rest[:-1]
        yield f"{rest[-1]}{closed}{comma}"
    yield f"{indent}}}"


def _value(value: Scalar | tuple[Scalar, ...], text: Callable[[str], str]) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_value(item, text) for item in value)}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return text(value)
    return number(value) if isinstance(value, float) else str(value)


def _yaml_text(text: str) -> str:
    plain = _PLAIN.fullmatch(text) and text.lower() not in _NOT_TEXT
    return text if plain else f"'{text}'"


_WRITERS: dict[str, Callable[[Any], str]] = {"yaml": _yaml, "toml": _toml, "json": _json}
