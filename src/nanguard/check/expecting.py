"""What data is checked against, as the command line and the settings of a project say it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nanguard.check.scanning import Expected
from nanguard.errors import SettingsError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_KEYS = ("label-key", "classes", "group-key", "groups", "vocab", "ignore-labels")
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
        if key not in _KEYS:
            raise SettingsError(
                f"there is no setting {key!r} of data.",
                where=str(path),
                do=f"The settings of data are: {', '.join(_KEYS)}.",
            )
    groups = table.get("groups", {})
    if not isinstance(groups, dict) or not all(_is_count(n) for n in groups.values()):
        raise _wrong(path, "groups", "a table of numbers of classes by name", groups)
    if groups and "group-key" not in table:
        raise _wrong(path, "group-key", "the key that names the data set", None)
    labels = table.get("ignore-labels", [])
    if not isinstance(labels, list) or not all(_is_whole(label) for label in labels):
        raise _wrong(path, "ignore-labels", "a list of whole numbers", labels)
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
        raise _wrong(path, key, "a word", value)
    return value


def _count(table: dict[str, Any], key: str, path: Path) -> int | None:
    value = table.get(key)
    if value is not None and not _is_count(value):
        raise _wrong(path, key, "a whole number above 0", value)
    return value


def _wrong(path: Path, key: str, wanted: str, value: Any) -> SettingsError:
    return SettingsError(
        f"data.{key} has to be {wanted}, not {value!r}.", where=str(path), do="Mend the file."
    )
