"""The data that configurations point to, what they say about it, and each file of it once."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanguard.check.config.document import ConfigTree
from nanguard.check.config.keys import USUAL, role
from nanguard.check.config.run_config import number_of
from nanguard.check.data.dataset import Missing, Request
from nanguard.check.data.formats import ENDINGS
from nanguard.check.scan import Expected

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from nanguard.check.config.document import Document, Leaf
    from nanguard.check.config.run_config import RunConfig

MAX_FILES = 10_000
_COUNTS = frozenset(USUAL["num_labels"].split())
_NAMES = frozenset(USUAL["label_names"].split())
_LABEL_KEYS_WORDS = (
    "label_column label_key label_field label_col target_column target_col target_key "
    "label_name target_field label_column_name target_name target_column_name y_column y_col "
    "labels_column label_attr"
)
_LABEL_KEYS = frozenset(_LABEL_KEYS_WORDS.split())
_GROUP_KEYS_WORDS = "group_key dataset_key dataset_column group_column dataset_field"
_GROUP_KEYS = frozenset(_GROUP_KEYS_WORDS.split())
_IGNORED_WORDS = (
    "ignore_index ignore_label ignore_value ignore_id ignored_label ignore_labels "
    "ignored_labels ignore_idx label_ignore_index pad_label_id label_pad_token_id "
    "ignore_class void_label ignore_indices label_pad_id ignore_label_id"
)
_IGNORED = frozenset(_IGNORED_WORDS.split())
_VOCABULARIES_WORDS = "vocab_size n_vocab vocabulary_size padded_vocab_size"
_VOCABULARIES = frozenset(_VOCABULARIES_WORDS.split())
_FOLDERS_WORDS = (
    "data_dir data_path dataset_path data_root train_dir dataset_dir data_folder val_dir "
    "train_data train_path dataset_folder train_data_dir"
)
_FOLDERS = frozenset(_FOLDERS_WORDS.split())
_TO_READ = re.compile(r"train|val|dev|test|eval|data|file|jsonl|csv|path|source|input|corpus")
_TO_WRITE = re.compile(
    r"out|save|log|result|pred|history|metric|ckpt|checkpoint|weight|cache|class|label|map|report|"
    r"vocab|tokenizer|config|stats|resume|pretrained|deepspeed"
)
_REGRESSION = re.compile(r"regress|\bmse\b|mse_?loss|l1_?loss|\bmae\b|huber|smooth_?l1|msle")
_TASKS_WORDS = "problem_type task task_type loss loss_type loss_name loss_fn criterion"
_TASKS = frozenset(_TASKS_WORDS.split())


def from_config(run: RunConfig) -> list[Request]:
    """Returns the data that a run reads, and what is to be expected of it.

    Paths count from the folder of the configuration, or from the folder above it. A file that is
    not there is noted where others that the run names are there, or lie beside it: a configuration
    that was copied without its data says nothing wrong.
    """
    return _requests(run.leaves, run.path)


def from_document(document: Document) -> list[Request]:
    """Returns the data that a file points to which configures no training by itself."""
    trees = [ConfigTree(root, document) for root in document.roots if root.kind == "mapping"]
    return [r for tree in trees for r in _requests(tuple(tree.read()[0]), document.path)]


def _requests(every: tuple[Leaf, ...], path: str) -> list[Request]:
    leaves = [leaf for leaf in every if role(leaf.sections) != "aside" or _reads(leaf)]
    groups = dict(_groups(leaves))
    common = _expected(leaves, groups)
    named = _class_names(every, leaves)
    if common.classes is None and not groups and named is not None:
        common = replace(common, classes=named[0])
    by_classes: dict[int | None, list[_FoundPath]] = {}
    for leaf in leaves:
        for found in _paths(leaf):
            by_classes.setdefault(_own_classes(leaf, leaves), []).append(found)
    there = any(found.paths for several in by_classes.values() for found in several)
    measured = _measured(leaves)
    out = []
    for classes, several in by_classes.items():
        expected = common if classes is None else replace(common, classes=classes)
        missing = tuple(f.missing for f in several if f.missing and (there or _expectable(f)))
        paths = tuple(dict.fromkeys(one for found in several for one in found.paths))
        if paths or missing:
            counted, named_by = named or (None, None)
            out.append(Request(paths, expected, measured, path, missing, counted, named_by))
    return out


@dataclass(frozen=True)
class _FoundPath:
    """What one setting points to: files, or something that is not there."""

    paths: tuple[Path, ...] = ()
    missing: Missing | None = None
    place: Path | None = None


def _reads(leaf: Leaf) -> bool:
    return leaf.key in _FOLDERS or any(True for _ in _written(leaf))


def _groups(leaves: list[Leaf]) -> Iterator[tuple[str, int]]:
    """Yields the data sets that have a number of classes each, by name."""
    for leaf in leaves:
        count = _finite(leaf) if leaf.key in _COUNTS else None
        if count is None or len(leaf.path) < 3 or count < 2:
            continue
        around = leaf.sections[-2] if len(leaf.sections) > 1 else ""
        if "dataset" not in around and around not in ("data", "data_sets", "sources", "corpora"):
            continue
        name = leaf.path[-2]
        if name.startswith("["):
            own = leaf.parent.get("name") or leaf.parent.get("dataset_name")
            name = str(own.value) if own is not None and own.kind == "scalar" else ""
        if name:
            yield name, int(count)


def _finite(leaf: Leaf) -> float | None:
    """Returns the number of a setting; None if it is none, or none that counts anything."""
    number = number_of(leaf.node.value)
    return number if number is not None and math.isfinite(number) else None


def _expected(leaves: list[Leaf], groups: dict[str, int]) -> Expected:
    ignored = [-100]
    for leaf in leaves:
        if leaf.key in _IGNORED:
            values = [leaf.node, *leaf.node.items]
            numbers = [number_of(node.value) for node in values if node.kind == "scalar"]
            ignored += [int(n) for n in numbers if n is not None and n.is_integer()]
    return Expected(
        label_key=_text(leaves, _LABEL_KEYS),
        classes=_classes(leaves, groups),
        groups=groups,
        group_key=_text(leaves, _GROUP_KEYS),
        vocabulary=_vocabulary(leaves),
        ignored=tuple(dict.fromkeys(ignored)),
    )


def _classes(leaves: list[Leaf], groups: dict[str, int]) -> int | None:
    """Returns the number of classes that holds for all data; what data says counts most."""
    found: dict[str | None, set[int]] = {}
    for leaf in leaves:
        count = number_of(leaf.node.value) if leaf.key in _COUNTS else None
        if count is None and leaf.key == "classes" and role(leaf.sections) in ("data", "model"):
            count = number_of(leaf.node.value)
        if count is None or count < 2 or not count.is_integer():
            continue
        if any(part in groups for part in leaf.path[:-1]) or leaf.path[-2:-1] == ("[0]",):
            continue
        found.setdefault("data" if role(leaf.sections) == "data" else None, set()).add(int(count))
    counts = found.get("data") or found.get(None) or set()
    return max(counts) if counts else None


def _vocabulary(leaves: list[Leaf]) -> int | None:
    found = [
        (role(leaf.sections) == "model", int(size))
        for leaf in leaves
        if leaf.key in _VOCABULARIES and (size := _finite(leaf)) and size > 1
    ]
    return max(found)[1] if found else None


def _text(leaves: list[Leaf], keys: frozenset[str]) -> str | None:
    values = [leaf.node.value for leaf in leaves if leaf.key in keys]
    return next((value for value in values if isinstance(value, str) and value), None)


def _class_names(every: tuple[Leaf, ...], leaves: list[Leaf]) -> tuple[int, str] | None:
    """Returns how many classes the configuration names, and where."""
    for leaf in leaves:
        names = leaf.node.items if leaf.key in _NAMES else []
        if len(names) > 1 and all(isinstance(node.value, str) for node in names):
            return len(names), ".".join(leaf.path)
    mapped = [leaf for leaf in every if leaf.sections[-1:] in (("id2label",), ("names",))]
    if len(mapped) > 1 and all(leaf.key.isdigit() for leaf in mapped):
        return len(mapped), ".".join(mapped[0].path[:-1])
    return None


def _measured(leaves: list[Leaf]) -> bool:
    """Returns whether the model is trained on measurements, not on classes."""
    counts = [number_of(leaf.node.value) for leaf in leaves if leaf.key in _COUNTS]
    for leaf in leaves:
        word = leaf.node.value
        inside = leaf.key in ("type", "name") and role(leaf.sections) == "loss"
        if (leaf.key in _TASKS or inside) and isinstance(word, str):
            spoken = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", word).lower()
            if _REGRESSION.search(spoken) and "classif" not in spoken:
                return True
    return bool(counts) and all(count == 1 for count in counts)


def _own_classes(leaf: Leaf, leaves: list[Leaf]) -> int | None:
    """Returns the number of classes that stands beside a path, in a section of several."""
    if not any(part.startswith("[") for part in leaf.path) and len(leaf.path) < 3:
        return None
    beside = [other for other in leaves if other.parent is leaf.parent and other.key in _COUNTS]
    count = _finite(beside[0]) if beside else None
    return int(count) if count is not None and count >= 2 else None


def _written(leaf: Leaf) -> Iterator[str]:
    """Yields the paths of data files that a setting names."""
    nodes = [leaf.node, *leaf.node.items]
    for node in nodes:
        value: Any = node.value if node.kind == "scalar" else None
        if not isinstance(value, str) or "://" in value or "${" in value or len(value) > 1000:
            continue
        ending = Path(value).suffix.lower()
        if ending in ENDINGS and _is_read(leaf.key, ending):
            yield value


def _is_read(key: str, ending: str) -> bool:
    """Returns whether a setting of this name holds a file to learn from."""
    if ending in (".npy", ".npz") and re.search(r"label|target|\by\b|feature|\bx\b", key):
        return True
    plain = ending not in (".json", ".safetensors")  # these may as well be something else
    return not _TO_WRITE.search(key) and (plain or bool(_TO_READ.search(key)))


def _paths(leaf: Leaf) -> Iterator[_FoundPath]:
    home = Path(leaf.home.path).parent
    for written in _written(leaf):
        yield _found(written, leaf, home)
    value = leaf.node.value
    if leaf.key in _FOLDERS and isinstance(value, str) and not Path(value).suffix:
        folder = _existing(value, home)
        if folder is not None and folder.is_dir():
            files = tuple(_files_in(folder))
            if files:
                yield _FoundPath(files)
            elif not any(folder.iterdir()):
                yield _FoundPath(missing=_missing(leaf, value, empty=True), place=folder / "x")


def _found(written: str, leaf: Leaf, home: Path) -> _FoundPath:
    if any(sign in written for sign in "*?["):
        base = home if not Path(written).is_absolute() else None
        paths = (
            tuple(sorted(base.glob(written)))[:MAX_FILES] if base and ".." not in written else ()
        )
        if paths or base is None:
            return _FoundPath(tuple(path for path in paths if path.is_file()))
    path = _existing(written, home)
    if path is not None and path.is_file():
        return _FoundPath((path,))
    return _FoundPath(missing=_missing(leaf, written), place=home / written)


def _missing(leaf: Leaf, written: str, *, empty: bool = False) -> Missing:
    path, key = str(leaf.document.path), ".".join(leaf.path)
    return Missing(path, leaf.entry.line, key, written, empty)


def _existing(written: str, home: Path) -> Path | None:
    for base in (home, home.parent):
        path = base / written
        try:
            if path.exists():
                return path
        except OSError:
            return None
    return None


def _expectable(found: _FoundPath) -> bool:
    """Returns whether a missing file lies in a folder that has data of its kind."""
    if found.place is None or found.missing is None:
        return False
    if found.missing.empty or Path(found.missing.written).is_absolute():
        return found.missing.empty
    folder = found.place.parent
    try:
        return folder.is_dir() and any(
            path.suffix.lower() == found.place.suffix.lower() for path in folder.iterdir()
        )
    except OSError:
        return False


def _files_in(folder: Path) -> Iterator[Path]:
    """Yields the data files of a folder, those in folders of it included."""
    from nanguard.check.data.formats import recognises

    for count, path in enumerate(sorted(folder.rglob("*"))):
        if count >= MAX_FILES:
            return
        if path.suffix.lower() in ENDINGS and path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                if recognises(path, file.read(1 << 16)):
                    yield path


def requests_of(runs: Iterable[RunConfig], found: Sequence[str]) -> list[Request]:
    """Returns the data that runs point to.

    Args:
        runs: The runs.
        found: The data files that were found anyhow; they keep the names they have there.
    """
    names = {os.path.realpath(path): Path(path) for path in found}
    merged: dict[frozenset[Path], Request] = {}
    taken: set[Path] = set()
    for run in runs:
        for request in from_config(run):
            paths = tuple(dict.fromkeys(_as_found(path, names) for path in request.paths))
            key = frozenset(paths)
            if key in merged:
                merged[key] = _merged(merged[key], request)
                continue
            left = tuple(path for path in paths if path not in taken)
            taken.update(left)
            if left or request.missing:
                merged[key] = replace(request, paths=left)
    return list(merged.values())


def _as_found(path: Path, names: dict[str, Path]) -> Path:
    known = names.get(os.path.realpath(path))
    return known if known is not None else Path(os.path.normpath(path))


def _merged(one: Request, other: Request) -> Request:
    """Returns what two runs expect of the same data: of two limits, the wider one."""
    return replace(
        one,
        expected=_wider(one.expected, other.expected),
        measured=one.measured or other.measured,
        missing=tuple(dict.fromkeys((*one.missing, *other.missing))),
    )


def _wider(one: Expected, other: Expected) -> Expected:
    groups = {name: max(one.groups.get(name, 0), n) for name, n in other.groups.items()}
    return replace(
        one,
        label_key=one.label_key or other.label_key,
        classes=max(filter(None, (one.classes, other.classes)), default=None),
        groups={**one.groups, **groups},
        group_key=one.group_key or other.group_key,
        vocabulary=max(filter(None, (one.vocabulary, other.vocabulary)), default=None),
        ignored=tuple(dict.fromkeys((*one.ignored, *other.ignored))),
    )
