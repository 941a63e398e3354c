"""How many classes or tokens there are, told by files that lie beside the data."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from nanguard.check.scanning import Expected

MAX_SIZE = 32 << 20
_TEXTS = ("labels.txt", "classes.txt", "class_names.txt", "label_names.txt", "label_list.txt")
_MAPS = (
    "classes.json",
    "class_names.json",
    "label_map.json",
    "label2id.json",
    "id2label.json",
    "label_names.json",
    "labels.json",
    "class_to_idx.json",
)
_INFOS = ("dataset_info.json", "dataset_infos.json", "info.json", "meta.json", "metadata.json")


@dataclass(frozen=True, slots=True)
class Named:
    """What files beside the data say.

    Attributes:
        classes: How many classes are named; None if none are.
        label_key: The column with those classes; None if that is not said.
        file: The file that names them.
        vocabulary: How many tokens there are; None if that is not said.
    """

    classes: int | None = None
    label_key: str | None = None
    file: str | None = None
    vocabulary: int | None = None


def named_beside(folder: Path) -> Named:
    """Returns what files in a folder say about the data in it."""
    found = _classes(folder)
    return replace(found, vocabulary=_vocabulary(folder))


def with_names(expected: Expected, named: Named) -> Expected:
    """Returns what is expected, completed by what is named; what is there already counts more."""
    return replace(
        expected,
        classes=expected.classes if expected.classes is not None else named.classes,
        label_key=expected.label_key or named.label_key,
        vocabulary=expected.vocabulary if expected.vocabulary is not None else named.vocabulary,
    )


def class_label(features: Any) -> tuple[str, int] | None:
    """Returns the column of classes that the description of a data set names, and their number."""
    found = []
    for name, feature in features.items() if isinstance(features, dict) else ():
        inner = feature
        for _ in range(3):
            if isinstance(inner, dict) and isinstance(inner.get("feature"), dict):
                inner = inner["feature"]
        names = inner.get("names") if isinstance(inner, dict) else None
        if isinstance(names, dict):  # the form that cards of data sets have
            names = list(names.values())
        if isinstance(names, list) and len(names) > 1:
            found.append((str(name), len(names)))
    return found[0] if len(found) == 1 else None


def _classes(folder: Path) -> Named:
    for name in _INFOS:
        found = class_label(_features(_load(folder / name)))
        if found is not None:
            return Named(found[1], found[0], str(folder / name))
    for name in _TEXTS:
        lines = _lines(folder / name)
        if lines and _are_names(lines):
            return Named(len(lines), file=str(folder / name))
    for name in _MAPS:
        count = _count(_load(folder / name))
        if count is not None:
            return Named(count, file=str(folder / name))
    return Named()


def _are_names(lines: list[str]) -> bool:
    """Returns whether lines name classes, rather than being the labels of records."""
    several = len(lines) > 1 and len(set(lines)) == len(lines)
    return several and not any(line.strip().lstrip("-").isdigit() for line in lines)


def _features(info: Any) -> Any:
    if not isinstance(info, dict):
        return None
    if "features" in info:
        return info["features"]
    inner = [value for value in info.values() if isinstance(value, dict)]
    return inner[0].get("features") if len(inner) == 1 else None


def _count(value: Any) -> int | None:
    """Returns how many classes a list of names, or a map of names and ids, has."""
    if isinstance(value, list):
        return len(value) if len(value) > 1 and all(isinstance(v, str) for v in value) else None
    if not isinstance(value, dict) or len(value) < 2:
        return None
    ids = [v for v in value.values() if isinstance(v, int) and not isinstance(v, bool)]
    if len(ids) != len(value):
        ids = [int(key) for key in value if str(key).isdigit()]
        if not all(isinstance(v, str) for v in value.values()):
            return None
    if len(ids) != len(value) or sorted(ids) != list(range(len(ids))):
        return None
    return len(ids)


def _vocabulary(folder: Path) -> int | None:
    for name in ("meta.json", "metadata.json", "info.json", "dataset_info.json"):
        info = _load(folder / name)
        size = info.get("vocab_size") if isinstance(info, dict) else None
        if isinstance(size, int) and not isinstance(size, bool) and size > 1:
            return size
    tokenizer = _load(folder / "tokenizer.json")
    if isinstance(tokenizer, dict) and isinstance(tokenizer.get("model"), dict):
        return _tokens(tokenizer)
    lines = _lines(folder / "vocab.txt")
    return len(lines) if lines and len(lines) > 1 else None


def _tokens(tokenizer: dict[str, Any]) -> int | None:
    vocabulary = tokenizer["model"].get("vocab")
    if not isinstance(vocabulary, (dict, list)) or len(vocabulary) < 2:
        return None
    ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    added = tokenizer.get("added_tokens")
    more = [t.get("id") for t in added if isinstance(t, dict)] if isinstance(added, list) else []
    known = [one for one in [*ids, *more] if isinstance(one, int)]
    return max(known) + 1 if known else None


def _lines(path: Path) -> list[str] | None:
    data = _bytes(path)
    if data is None:
        return None
    return [line for line in data.decode("utf-8", "replace").splitlines() if line.strip()]


def _load(path: Path) -> Any:
    data = _bytes(path)
    try:
        return None if data is None else json.loads(data)
    except (ValueError, RecursionError):
        return None


def _bytes(path: Path) -> bytes | None:
    try:
        if not path.is_file() or path.stat().st_size > MAX_SIZE:
            return None
        return path.read_bytes()
    except OSError:
        return None
