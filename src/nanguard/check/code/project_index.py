"""What is counted in all files of a project: what is called, named and imported, and its settings.

It is counted by words and not by syntax, as all files are read for it. What was counted is kept
between two checks, and goes for files that were written since as long as these count the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nanguard.check.code.reach import (
    Reach,
    evaluates_name,
    is_training_code,
    outline_of,
    reach_of_training,
)
from nanguard.check.code.scopes import bytes_of
from nanguard.check.code.training_path import is_named_for_evaluation
from nanguard.source.text import own_folder, write_atomically

if TYPE_CHECKING:
    from pathlib import Path

_DEFINED = re.compile(rb"\n[ \t]*(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)")
# Everything but words and the parentheses behind them is blank.
_WORDS = bytes(c if c in b"_(" or chr(c).isalnum() else 32 for c in range(128)) + b" " * 128
# Names of functions that every file has for other things as well.
_COMMON = frozenset({"forward", "loss", "train", "main", "step", "update", "model", "data", "run"})
# What makes things by a path that a configuration holds.
_BY_PATH = (b"hydra", b"'_target_'", b'"_target_"', b"pydoc.locate(")
_BY_NAME = (
    b"import_module(", b"__import__(", b"pkgutil", b"registry", *_BY_PATH,
    b"globals()[", b"__dict__[",
)  # fmt: skip
_MADE_BY_NAME = re.compile(rb"getattr\([^()\n]*\)\(")
_IMPORTS = re.compile(rb"\n[ \t]*(?:from|import)[ \t]+([^\n#]+)")
_NUMBER = (
    r"(-?\d[\d_]*(?:\.\d*)?(?:[eE][+-]?\d+)?|-?\.\d+(?:[eE][+-]?\d+)?|float\(['\"]-?inf['\"]\))"
)
_OPTION = re.compile(
    r"add_argument\(\s*(?:['\"]-\w['\"]\s*,\s*)?['\"]--?([A-Za-z][\w\-]*)['\"]"
    r"[^()]{0,400}?\bdefault\s*=\s*" + _NUMBER
)
_FIELD = re.compile(
    r"^[ \t]+(\w+)[ \t]*:[ \t]*[\w\[\]., |\"']{1,60}=[ \t]*" + _NUMBER, re.MULTILINE
)
_LONGEST_SETTINGS = 400_000  # characters; a file of settings is shorter


@dataclass(slots=True)
class ProjectIndex:
    """What is called and named in a project, by name.

    Attributes:
        callers: The files that call something.
        users: The files that name something without calling it, as to give it another name.
        words: How often something is named, its definition counted.
        trains: The files that start a backward pass, or hand a model to a trainer.
        imported: The words of all import statements.
        by_name: Whether some file is imported by a name that is put together at run time.
        by_path: Whether something is made by a path that stands in a configuration.
    """

    callers: dict[str, list[str]] = field(default_factory=dict)
    users: dict[str, list[str]] = field(default_factory=dict)
    words: dict[str, int] = field(default_factory=dict)
    trains: set[str] = field(default_factory=set)
    imported: set[str] = field(default_factory=set)
    by_name: bool = False
    by_path: bool = False


@dataclass(slots=True)
class Counted:
    """What is counted in all files of a project."""

    index: ProjectIndex
    reach: Reach
    settings: dict[str, set[float]]


_KEPT_SCHEMA = "nanguard.project/1"
_MOST_CHANGED = 16  # files that are compared one by one before everything is counted again
_KEPT_FROM = 40  # files; below, counting them costs less than keeping the numbers
_KEPT_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class KeptIndex:
    """A file in which is kept what was counted in all files of a project.

    A file that was written since then changes nothing as long as it defines, calls and names the
    same things of the project, and imports the same modules.

    Attributes:
        file: Where it is kept.
        made_by: What tells one state of the program from another.
    """

    file: Path
    made_by: str

    def load(self, paths: list[str]) -> Counted | None:
        """Returns what was counted; None if it is not there, or of other files."""
        if len(paths) < _KEPT_FROM:
            return None
        try:
            if self.file.stat().st_size > _KEPT_BYTES:
                return None
            told = json.loads(self.file.read_bytes())
            if [told["schema"], told["made_by"]] != [_KEPT_SCHEMA, self.made_by]:
                return None
            return self._counted(told, paths)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def save(self, paths: list[str], counted: Counted) -> None:
        """Writes what was counted."""
        if len(paths) < _KEPT_FROM:
            return
        index, reach = counted.index, counted.reach
        defined = {word.encode() for word in index.words}
        told = {
            "schema": _KEPT_SCHEMA,
            "made_by": self.made_by,
            "files": {path: [*_stamp(path), _facts(path, defined)] for path in sorted(paths)},
            "callers": index.callers,
            "users": index.users,
            "words": index.words,
            "trains": sorted(index.trains),
            "imported": sorted(index.imported),
            "by_name": index.by_name,
            "by_path": index.by_path,
            "reached": sorted(reach.reached),
            "unused": sorted(reach.unused),
            "settings": {name: sorted(found) for name, found in counted.settings.items()},
        }
        try:
            own_folder(self.file.parent)
            write_atomically(self.file, json.dumps(told, separators=(",", ":")).encode())
        except (OSError, ValueError):  # a folder that cannot be written to is no reason to fail
            return

    def _counted(self, told: dict[str, Any], paths: list[str]) -> Counted | None:
        files = told["files"]
        if len(files) != len(paths) or any(path not in files for path in paths):
            return None
        changed = [path for path in paths if [*_stamp(path)] != files[path][:2]]
        if len(changed) > _MOST_CHANGED:
            return None
        index = ProjectIndex(
            told["callers"],
            told["users"],
            told["words"],
            set(told["trains"]),
            set(told["imported"]),
            bool(told["by_name"]),
            bool(told["by_path"]),
        )
        if changed:
            defined = {word.encode() for word in index.words}
            if any(_facts(path, defined) != files[path][2] for path in changed):
                return None
        reach = Reach(
            frozenset((path, name) for path, name in told["reached"]),
            frozenset((path, name) for path, name in told["unused"]),
        )
        settings = {name: set(map(float, found)) for name, found in told["settings"].items()}
        return Counted(index, reach, settings)


def _stamp(path: str) -> tuple[int, int]:
    """Returns what changes when a file is written."""
    try:
        about = os.stat(path)  # noqa: PTH116 - a Path for each is slow
    except OSError:
        return (0, 0)
    return (about.st_mtime_ns, about.st_size)


def _facts(path: str, defined: set[bytes]) -> str:
    """Returns a digest of all that is counted in a file, given what the project defines."""
    data = bytes_of(path)
    words = Counter(data.translate(_WORDS).replace(b"(", b"( ").split())
    told = (
        _DEFINED.findall(b"\n" + data),
        sorted((w, n) for w, n in words.items() if w.removesuffix(b"(") in defined),
        is_training_code(data),
        _imports_by_name(data),
        _makes_by_path(data),
        [line.translate(_WORDS).split() for line in _IMPORTS.findall(b"\n" + data)],
        _settings_in(data),
        outline_of(data, defined),
    )
    return hashlib.blake2b(repr(told).encode(), digest_size=16).hexdigest()


def counted_in(paths: list[str], kept: KeptIndex | None) -> Counted:
    """Returns what is counted in files, from the last check where nothing of it has changed.

    Args:
        paths: The files.
        kept: Where it is kept; None if it is not.
    """
    found = kept.load(paths) if kept is not None else None
    if found is None:
        reach = reach_of_training(paths, is_named_for_evaluation)
        found = Counted(_index_of(paths), reach, _settings_of(paths))
        if kept is not None:
            kept.save(paths, found)
    return found


def _index_of(paths: list[str]) -> ProjectIndex:
    """Returns where what the project defines is called, and how often it is named."""
    definitions = {path: Counter(_DEFINED.findall(b"\n" + bytes_of(path))) for path in paths}
    defined: set[bytes] = set().union(*definitions.values())
    index = ProjectIndex()
    imported: set[bytes] = set()
    for path, here in definitions.items():
        data = bytes_of(path)
        if is_training_code(data):
            index.trains.add(path)
        index.by_name = index.by_name or _imports_by_name(data)
        index.by_path = index.by_path or _makes_by_path(data)
        for line in _IMPORTS.findall(b"\n" + data):
            imported.update(line.translate(_WORDS).split())
        # A word that is called ends in its parenthesis.
        words = Counter(data.translate(_WORDS).replace(b"(", b"( ").split())
        for word, number in words.items():
            name = word[:-1] if word.endswith(b"(") else word
            if name not in defined:
                continue
            told = name.decode(errors="replace")
            index.words[told] = index.words.get(told, 0) + number
            if word is not name and number > here[name]:
                index.callers.setdefault(told, []).append(path)
            elif word is name and told not in _COMMON:
                index.users.setdefault(told, []).append(path)
    index.imported = {word.decode(errors="replace") for word in imported}
    return index


def _settings_of(paths: list[str]) -> dict[str, set[float]]:
    """Returns the defaults of options and of fields of settings, by name."""
    found: dict[str, set[float]] = {}
    for path in paths:
        for name, number in _settings_in(bytes_of(path)):
            found.setdefault(name.replace("-", "_"), set()).add(_number(number))
    return found


def _settings_in(data: bytes) -> list[tuple[str, str]]:
    """Returns the options and the fields of settings in a file, with their numbers."""
    if b"add_argument" not in data and b"@dataclass" not in data:
        return []
    content = data[:_LONGEST_SETTINGS].decode(errors="replace")
    pairs: list[tuple[str, str]] = _OPTION.findall(content)
    if "@dataclass" in content:
        pairs += _FIELD.findall(content)
    return pairs


def _imports_by_name(data: bytes) -> bool:
    """Returns whether a file imports or makes something by a name put together at run time."""
    return (
        any(word in data for word in _BY_NAME)
        or _MADE_BY_NAME.search(data) is not None
        or evaluates_name(data)
    )


def _makes_by_path(data: bytes) -> bool:
    """Returns whether a file may make a class that no code names."""
    return any(word in data for word in _BY_PATH) or evaluates_name(data)


def _number(text: str) -> float:
    if text.startswith("float("):
        return float("-inf") if "-" in text else float("inf")
    return float(text.replace("_", ""))
