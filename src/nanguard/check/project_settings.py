"""The settings of a project: ``nanguard.toml``, or ``[tool.nanguard]`` in ``pyproject.toml``."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanguard.check.scan import Expected
from nanguard.errors import SettingsError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

_DATA_KEYS = ("label-key", "classes", "group-key", "groups", "vocab", "ignore-labels")
_FORM = "KEY=NAME:N,NAME:N"


def expected_by(table: dict[str, Any], path: Path) -> Expected:
    """Returns what the table ``data`` of the settings says.

    Args:
        table: The table.
        path: The file it stands in.

    Raises:
        SettingsError: It cannot be understood.
    """
    for key in table:
        if key not in _DATA_KEYS:
            raise SettingsError(
                f"there is no setting {key!r} of data.",
                where=str(path),
                do=f"The settings of data are: {', '.join(_KEYS)}.",
            )
    groups = table.get("groups", {})
    if not isinstance(groups, dict) or not all(_is_count(n) for n in groups.values()):
        raise _wrong_data(path, "groups", "a table of numbers of classes by name", groups)
    if groups and "group-key" not in table:
        raise _wrong_data(path, "group-key", "the key that names the data set", None)
    labels = table.get("ignore-labels", [])
    if not isinstance(labels, list) or not all(_is_whole(label) for label in labels):
        raise _wrong_data(path, "ignore-labels", "a list of whole numbers", labels)
    return Expected(
        label_key=_word(table, "label-key", path),
        classes=_count(table, "classes", path),
        groups=groups,
        group_key=_word(table, "group-key", path),
        vocabulary=_count(table, "vocab", path),
        ignored=_with(Expected().ignored, labels),
    )


def expected_also(
    known: Expected,
    *,
    label_key: str | None = None,
    classes: int | None = None,
    groups: Iterable[str] = (),
    vocab: int | None = None,
    ignored: Iterable[int] = (),
) -> Expected:
    """Returns what is expected once the command line has its say.

    Args:
        known: What the settings say.
        label_key: What holds labels.
        classes: How many classes there are.
        groups: Classes by data set, each as ``KEY=NAME:N,NAME:N``.
        vocab: How many tokens there are.
        ignored: Labels that are meant to be skipped, besides those of the settings.

    Raises:
        UsageError: A group cannot be understood.
    """
    key, counts = known.group_key, dict(known.groups)
    for words in groups:
        named, some = _group(words)
        # Records are told apart by one key: another one replaces what was known.
        counts = {**counts, **some} if named == key else some
        key = named
    return replace(
        known,
        label_key=label_key or known.label_key,
        classes=known.classes if classes is None else classes,
        groups=counts,
        group_key=key,
        vocabulary=known.vocabulary if vocab is None else vocab,
        ignored=_with(known.ignored, ignored),
    )


def _group(words: str) -> tuple[str, dict[str, int]]:
    key, given, rest = words.partition("=")
    counts: dict[str, int] = {}
    for word in rest.split(","):
        # Names may hold colons, numbers do not.
        name, colon, number = word.strip().rpartition(":")
        if not (colon and name and number.isdecimal() and int(number) > 0):
            raise _no_group(words)
        counts[name] = int(number)
    if not given or not key.strip():
        raise _no_group(words)
    return key.strip(), counts


def _no_group(words: str) -> UsageError:
    return UsageError(
        f"{words!r} is no group of data sets.",
        where="--group",
        do=f"Write {_FORM}, for example dataset_name=food101:101,food172:172.",
    )


def _with(known: tuple[int, ...], more: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys((*known, *more)))


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_whole(value) and value > 0


def _word(table: dict[str, Any], key: str, path: Path) -> str | None:
    value = table.get(key)
    if value is not None and not (isinstance(value, str) and value):
        raise _wrong_data(path, key, "a word", value)
    return value


def _count(table: dict[str, Any], key: str, path: Path) -> int | None:
    value = table.get(key)
    if value is not None and not _is_count(value):
        raise _wrong_data(path, key, "a whole number above 0", value)
    return value


def _wrong_data(path: Path, key: str, wanted: str, value: Any) -> SettingsError:
    return SettingsError(
        f"data.{key} has to be {wanted}, not {value!r}.", where=str(path), do="Fix the file."
    )


_SETTINGS_BYTES = 1 << 20
_FAIL_ON = ("error", "warning", "info", "none")
_KEYS = (
    "select",
    "extend-select",
    "ignore",
    "fail-on",
    "per-file-ignores",
    "exclude",
    "baseline",
    "data",
)


@dataclass(frozen=True, slots=True)
class ProjectSettings:
    """What a project wants from ``nanguard check``.

    Attributes:
        root: The folder of the settings; patterns and the baseline are relative to it.
        select: Names, codes or beginnings of codes of the rules to run; none for all.
        extend: Names, codes or groups of rules to run besides.
        ignore: The same, of rules to leave out.
        fail_on: From which severity on the exit code is 1.
        per_file: Pairs of a pattern and what is left out of the files it matches.
        exclude: Patterns, as in a ``.gitignore``, of what is left out of folders.
        baseline: The file with the findings that are known.
        expected: What data is checked against.
    """

    root: Path
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    fail_on: str = "error"
    per_file: tuple[tuple[str, tuple[str, ...]], ...] = ()
    exclude: tuple[str, ...] = ()
    baseline: Path | None = None
    extend: tuple[str, ...] = ()
    expected: Expected = field(default_factory=Expected)


def find_project(start: str) -> ProjectSettings:
    """Returns the settings nearest to a path, in its folder or above; the defaults if none.

    Raises:
        SettingsError: They cannot be understood.
    """
    # Not resolved: whoever names a link means the place it is in.
    place = Path(os.path.abspath(start))  # noqa: PTH100
    for folder in (place, *place.parents):
        own = folder / "nanguard.toml"
        if own.is_file():
            return _project(_read(own) or {}, own)
        shared = folder / "pyproject.toml"
        table = _table(shared) if shared.is_file() else None
        if table is not None:
            return _project(table, shared)
    return ProjectSettings(Path.cwd())


def _table(path: Path) -> dict[str, Any] | None:
    told = _read(path, only_with=b"nanguard")
    tool = told.get("tool") if told else None
    table = tool.get("nanguard") if isinstance(tool, dict) else None
    if table is not None and not isinstance(table, dict):
        raise _wrong(path, "tool.nanguard", "a table", table)
    return table


def _read(path: Path, only_with: bytes = b"") -> dict[str, Any] | None:
    try:
        with path.open("rb") as file:
            data = file.read(_SETTINGS_BYTES)
    except OSError as error:
        raise SettingsError(
            f"the settings cannot be read: {error.strerror}.",
            where=str(path),
            do="Make the file readable, or run nanguard elsewhere.",
        ) from error
    if only_with not in data:
        return None
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        told: dict[str, Any] = tomllib.loads(data.decode("utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SettingsError(
            f"the settings are not TOML: {error}.", where=str(path), do="Fix the file."
        ) from error
    return told


def _project(table: dict[str, Any], path: Path) -> ProjectSettings:
    for key in table:
        if key not in _KEYS:
            raise SettingsError(
                f"there is no setting {key!r}.",
                where=str(path),
                do=f"The settings are: {', '.join(_KEYS)}.",
            )
    per_file = table.get("per-file-ignores", {})
    if not isinstance(per_file, dict):
        raise _wrong(path, "per-file-ignores", "a table", per_file)
    baseline = table.get("baseline")
    if baseline is not None and not isinstance(baseline, str):
        raise _wrong(path, "baseline", "the name of a file", baseline)
    data = table.get("data", {})
    if not isinstance(data, dict):
        raise _wrong(path, "data", "a table", data)
    return ProjectSettings(
        path.parent,
        select=_words(table, "select", path),
        extend=_words(table, "extend-select", path),
        ignore=_words(table, "ignore", path),
        fail_on=_fail_on(table, path),
        per_file=tuple((pattern, _words(per_file, pattern, path)) for pattern in per_file),
        exclude=_words(table, "exclude", path),
        baseline=path.parent / baseline if baseline else None,
        expected=expected_by(data, path),
    )


def _fail_on(table: dict[str, Any], path: Path) -> str:
    value = table.get("fail-on", "error")
    if value not in _FAIL_ON:
        raise _wrong(path, "fail-on", f"one of {', '.join(_FAIL_ON)}", value)
    return str(value)


def _words(table: dict[str, Any], key: str, path: Path) -> tuple[str, ...]:
    value = table.get(key, [])
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise _wrong(path, key, "a list of words", value)
    return tuple(value)


def _wrong(path: Path, key: str, wanted: str, value: Any) -> SettingsError:
    return SettingsError(
        f"{key} has to be {wanted}, not {value!r}.", where=str(path), do="Fix the file."
    )
