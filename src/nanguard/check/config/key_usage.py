"""Which keys of configurations the code of a project reads, and what launch scripts override."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from nanguard.check.config.keys import normal
from nanguard.check.config.value_uses import TypedFields, ValueUses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

_ENDINGS = (".sh", ".bash", ".zsh", ".slurm", ".sbatch", ".pbs")
_LARGEST_SCRIPT = 256 << 10  # bytes; a script that starts something is shorter
_STARTS = re.compile(
    r"\b(accelerate\s+launch|deepspeed|torchrun|python[\d.]*|srun|llamafactory-cli)\b"
)
_SHELL_WORD = re.compile(r"[\w./{}$\-]+")
_CONFIGURATIONS = (".yaml", ".yml", ".json", ".toml")
_SHELL_OPTION = re.compile(r"--([A-Za-z][\w.\-]*)(?:[ =]([^\s\\]+))?")
_ASSIGNED = re.compile(r"(?:^|\s)\+{0,2}([A-Za-z_][\w.]*)=([^\s\\]+)")


@dataclass(frozen=True, slots=True)
class Launch:
    """One command that starts a training.

    Attributes:
        script: The script it stands in.
        files: The names of the configurations it mentions, without their folders.
        options: What it sets itself, by the last part of each key in normal form.
    """

    script: str
    files: frozenset[str]
    options: dict[str, str] = field(default_factory=dict)

    def names(self, path: str) -> bool:
        """Returns whether the command mentions a file."""
        return PurePath(path).name in self.files


def is_launcher(path: str) -> bool:
    """Returns whether a file may start a training, by its name."""
    return path.endswith(_ENDINGS)


def launches_in(paths: Iterable[str]) -> Iterator[Launch]:
    """Yields the commands of scripts that start something with a configuration."""
    for path in paths:
        try:
            with Path(path).open(encoding="utf-8", errors="replace") as file:
                content = file.read(_LARGEST_SCRIPT)
        except OSError:
            continue
        for command in content.replace("\\\n", " ").split("\n"):
            if command.lstrip().startswith("#") or not _STARTS.search(command):
                continue
            words = (
                word for word in _SHELL_WORD.findall(command) if word.endswith(_CONFIGURATIONS)
            )
            files = frozenset(PurePath(word).name for word in words)
            if files:
                yield Launch(path, files, _options(command))


def _options(command: str) -> dict[str, str]:
    found = [*_SHELL_OPTION.findall(command), *_ASSIGNED.findall(command)]
    return {normal(key.rpartition(".")[2]): value for key, value in found}


_TEXT = re.compile(r"""["']([A-Za-z_][\w.\-]{0,63})["']""")
# A method that is called is not a key that is read, `get` and its like apart.
_ATTRIBUTE = re.compile(r"\.([A-Za-z_]\w*)\b(?!\s*\()")
_FIELD = re.compile(r"^[ \t]+([a-z_]\w*)[ \t]*:[ \t]*[A-Za-z\"']", re.MULTILINE)
_CODE_OPTION = re.compile(r"""["']--([A-Za-z][\w\-]*)["']""")
# A number is made of what was read: at once, or of the name that was given to it.
_CAST = re.compile(r"\bfloat\(([^()\n]*(?:\([^()\n]*\)[^()\n]*)?)\)")
_GIVEN = re.compile(
    r"^[ \t]*(\w+)[ \t]*(?::[^=\n]+)?=(.*(?:\.get\(|\[)[ \t]*[\"'].*)$", re.MULTILINE
)
# argparse converts a default that is text as it converts a word of the command line.
_FLOAT_OPTION = re.compile(
    r"""add_argument\(\s*(?:["']-\w["']\s*,\s*)?["']--([A-Za-z][\w\-]*)["'][^()]{0,400}\btype\s*=\s*float\b"""
)
_SETS_DEFAULTS = re.compile(r"\.set_defaults\(\s*\*\*|\bTrlParser\(|\bconfigargparse\b")
# A value as code reads it: a name, an attribute, or a key in quotes. Its length is bounded, since
# data in a file of code may be one long word.
_VALUE = (
    r"""(?<![\w.])(?:[\w.\[\]]{1,80}[.\[(])?["']?([A-Za-z_]\w{0,63})["']?"""
    r"""(?:[ \t]*,[^(),\n]{0,40})?[\])]{0,3}"""
)
_GOES_ON = r"[ \t]*(?::(?![ \t]*(?:\n[ \t]*)?raise\b)|else\b|and\b)"
# Code that has another value to take, or nothing to do, where a count is 0.
_FALLBACKS = tuple(
    re.compile(pattern)
    for pattern in (
        rf"{_VALUE}[ \t]+(?:or|and)\s+\S",
        rf"\bmax\(\s*1[ \t]*,\s*(?:int\()?{_VALUE}",
        rf"\bmax\(\s*(?:int\()?{_VALUE}(?:[ \t]*,)?\s*1\s*\)",
        rf"\b(?:if|and)[ \t]+(?:not[ \t]+)?{_VALUE}{_GOES_ON}",
        rf"\b(?:if|and|or)[ \t]+{_VALUE}[ \t]*(?:>[ \t]*[01]|>=[ \t]*[12])\b",
        rf"\b(?:if|and|or)[ \t]+{_VALUE}[ \t]*(?:<[ \t]*1|<=[ \t]*0|==[ \t]*0)\b{_GOES_ON}",
    )
)
_DIVISION = re.compile(r"(?:/|%)=?[ \t]*(?:float\(|int\()?" + _VALUE)
_SAME_AS = re.compile(
    r"^[ \t]*(?:self\.)?(\w+)[ \t]*(?::[^=\n]+)?=[ \t]*[\w.]+\.(\w+)[ \t]*(?:#.*)?$", re.MULTILINE
)
_LARGEST_CODE = 1 << 20
_MOST_FILES = 5_000
_FOLDERS_ABOVE = 5  # folders above a configuration in which its project may begin
_MARKS = ("pyproject.toml", "setup.py", "requirements.txt")


_CODE_WORD = re.compile(r"\b[A-Za-z_]\w*\b(?!\s*\()")
_OPTIMIZER = re.compile(
    r"\b(SGD|Adam|AdamW|RAdam|NAdam|Adamax|RMSprop|Adagrad|Adafactor|Lion|LAMB|LARS)\("
)
# What code that unpacks a section hands on without naming it.
_HANDED_ON = frozenset(
    normal(key) for key in ("lr", "learning_rate", "weight_decay", "betas", "eps", "momentum")
)


@dataclass(slots=True)
class _FoundKeys:
    read: set[str] = field(default_factory=set)
    cast: set[str] = field(default_factory=set)
    words: set[str] = field(default_factory=set)
    optimizers: set[str] = field(default_factory=set)
    options: set[str] = field(default_factory=set)
    sets_defaults: bool = False


@dataclass(slots=True)
class _FoundCounts:
    optional: set[str] = field(default_factory=set)
    divisors: set[str] = field(default_factory=set)


@dataclass(eq=False)
class Usage:
    """What the code of a project does with keys of configurations.

    Attributes:
        find: Returns the files of code; asked once, and only if something depends on it.
        scripts: The scripts that may start a training.
    """

    find: Callable[[], Sequence[str]] = tuple
    scripts: tuple[str, ...] = ()

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """The files of code; none if there is no code to look at."""
        return tuple(self.find())[:_MOST_FILES]

    @cached_property
    def launches(self) -> tuple[Launch, ...]:
        """The commands that start a training with a configuration."""
        return tuple(launches_in(self.scripts[:_MOST_FILES]))

    def overridden(self, path: str, *keys: str) -> bool:
        """Returns whether every command that names a file sets one of these keys itself."""
        started = [launch for launch in self.launches if launch.names(path)]
        wanted = {normal(key) for key in keys}
        return bool(started) and all(wanted & launch.options.keys() for launch in started)

    @property
    def known(self) -> bool:
        """Whether there is any code to go by."""
        return bool(self.paths)

    def reads(self, key: str) -> bool:
        """Returns whether the code mentions a key the way keys are read.

        Args:
            key: The key, dotted or not, as the file writes it; its last part counts.
        """
        return normal(key.rpartition(".")[2]) in self._found.read

    def makes_number(self, key: str) -> bool:
        """Returns whether the code turns what it reads under a key into a number."""
        return normal(key.rpartition(".")[2]) in self._found.cast

    def declares_number(self, path: Sequence[str]) -> bool:
        """Returns whether a value goes to a field, or an option, that makes a number of its text.

        Args:
            path: The keys of the file that lead to the value, outermost first.
        """
        keys = [normal(key) for key in path if not key.startswith("[")]
        if not keys or not self.known:
            return False
        # What stands below a field that holds numbers is a mapping of names to numbers.
        if not self._numbers.isdisjoint(keys[-2:]):
            return True
        return self._found.sets_defaults and keys[-1] in self._found.options

    def computes_with(self, path: Sequence[str]) -> str:
        """Returns where the code computes with a value of a file; empty if that was not seen.

        An option of the same name that is a number may be what is meant there.
        """
        keys = [normal(key) for key in path if not key.startswith("[")]
        is_option = bool(keys) and keys[-1] in self._found.options
        return "" if is_option else self.values.needs_number(path)

    def allows_zero(self, key: str) -> bool:
        """Returns whether the code takes another way where what it reads under a key is 0."""
        return normal(key.rpartition(".")[2]) in self._counts.optional

    def divides_by(self, key: str) -> bool:
        """Returns whether the code divides by what it reads under a key."""
        return normal(key.rpartition(".")[2]) in self._counts.divisors

    def mentions(self, key: str) -> bool:
        """Returns whether a key, or a name like it, stands anywhere in the code.

        Keys that are usually unpacked together, such as those of an optimizer, always count.
        """
        name = normal(key.rpartition(".")[2])
        return name in _HANDED_ON or name in self._found.words or self.reads(key)

    @property
    def optimizers(self) -> frozenset[str]:
        """The optimizers that the code makes, in lower case."""
        return frozenset(self._found.optimizers)

    @property
    def scales_by_layer(self) -> bool:
        """Whether the code has an optimizer that divides by the norm of each layer's gradient."""
        return not self._found.words.isdisjoint({"lars", "lamb", "larc"})

    @cached_property
    def values(self) -> ValueUses:
        """What the code does with values of configurations."""
        return ValueUses(self.paths, _content)

    @cached_property
    def _found(self) -> _FoundKeys:
        found = _FoundKeys()
        for path in self.paths:
            _look(_content(path), found)
        return found

    @cached_property
    def _counts(self) -> _FoundCounts:
        found = _FoundCounts()
        for path in self.paths:
            _look_at_counts(_content(path), found)
        return found

    @cached_property
    def _numbers(self) -> frozenset[str]:
        fields = TypedFields(_content)
        for path in self.paths:
            fields.look(path, _content(path))
        return fields.numbers()


def project_of(path: str) -> str | None:
    """Returns the folder of the project that a file belongs to; None if nothing marks one."""
    folder = os.path.dirname(os.path.abspath(path))  # noqa: PTH100, PTH120 - a Path is slow
    return _repository_above(folder) or _marked_above(folder)


def repository_of(path: str) -> str | None:
    """Returns the repository that a file belongs to; None if it lies in none."""
    return _repository_above(os.path.dirname(os.path.abspath(path)))  # noqa: PTH100, PTH120


@lru_cache(maxsize=4096)
def _repository_above(folder: str) -> str | None:
    if os.path.exists(os.path.join(folder, ".git")):  # noqa: PTH110, PTH118
        return folder
    above = os.path.dirname(folder)  # noqa: PTH120
    return _repository_above(above) if above != folder else None


@lru_cache(maxsize=4096)
def _marked_above(folder: str) -> str | None:
    """Returns the outermost folder that a file of a project's own marks."""
    place = Path(folder)
    folders = [p for p in (place, *place.parents)[:_FOLDERS_ABOVE] if p != Path.home()]
    marked = (p for p in reversed(folders) if any((p / mark).exists() for mark in _MARKS))
    return next(map(str, marked), None)


def _content(path: str) -> str:
    """Returns what a file of code holds; nothing if it cannot be read."""
    try:
        with Path(path).open(encoding="utf-8", errors="replace") as file:
            return file.read(_LARGEST_CODE)
    except OSError:
        return ""


def _look(content: str, found: _FoundKeys) -> None:
    for pattern in (_TEXT, _ATTRIBUTE, _FIELD, _CODE_OPTION):
        for name in set(pattern.findall(content)):
            found.read |= {normal(part) for part in name.split(".")}
    found.words |= {normal(word) for word in set(_CODE_WORD.findall(content))}
    found.optimizers |= {name.lower() for name in _OPTIMIZER.findall(content)}
    found.options |= {normal(name) for name in _FLOAT_OPTION.findall(content)}
    found.sets_defaults |= _SETS_DEFAULTS.search(content) is not None
    if "float" not in content:
        return
    given = {name: _TEXT.findall(read) for name, read in _GIVEN.findall(content)}
    for inside in set(_CAST.findall(content)):
        keys = [*_TEXT.findall(inside), *given.get(inside.strip(), ())]
        if re.fullmatch(r"[\w.\[\]]+\.\w+", inside.strip()):
            keys.append(inside.strip().rpartition(".")[2])
        found.cast |= {normal(key) for key in keys}


def _look_at_counts(content: str, found: _FoundCounts) -> None:
    given: dict[str, list[str]] = {}
    for name, read in _GIVEN.findall(content):
        given.setdefault(name, []).extend(_TEXT.findall(read))
    for name, read in _SAME_AS.findall(content):
        given.setdefault(name, []).append(read)
    optional = {name for pattern in _FALLBACKS for name in pattern.findall(content)}
    for names, into in (
        (optional, found.optional),
        (set(_DIVISION.findall(content)), found.divisors),
    ):
        into |= {normal(key) for name in names for key in (name, *given.get(name, ()))}
